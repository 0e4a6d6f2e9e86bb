"""Every field that a run reads, with its default; each other config starts from this one and changes what it must.

Purpose: the reference of the fields. It names no model, so it does not run by itself:
  jetrl train --config base --config.model.path=FOLDER
A field that may be unset is a placeholder of its type (None until set); everything else keeps the type of its default.
"""

from ml_collections import config_dict


def get_config() -> config_dict.ConfigDict:
    """The defaults, locked: a misspelt field in a config that starts from here is an error."""
    c = config_dict.ConfigDict()

    # The run: where it writes (metrics.jsonl, checkpoints, the curve), how many optimizer steps it takes.
    c.seed = 0
    c.out = "runs/default"
    c.steps = 10

    # The model: a Hugging Face folder (config.json, safetensors, tokenizer).
    c.model = config_dict.ConfigDict()
    c.model.path = ""

    # Precision: a preset by name, then single edges ("e4m3 1x128 float32") and parameter paths ("layers/0/*=bf16") on top.
    c.policy = "jet_fp8"
    c.policy_overrides = config_dict.ConfigDict()
    c.policy_overrides.weight = config_dict.placeholder(str)
    c.policy_overrides.activation = config_dict.placeholder(str)
    c.policy_overrides.gradient = config_dict.placeholder(str)
    c.policy_overrides.saved_activation = config_dict.placeholder(str)
    c.policy_overrides.kv_cache = config_dict.placeholder(str)
    c.policy_overrides.logits = config_dict.placeholder(str)
    c.policy_overrides.reductions = config_dict.placeholder(str)
    c.policy_overrides.kernels = config_dict.placeholder(str)  # on Hopper: auto, off, required
    c.policy_overrides.paths = ()

    # Data: sums of `terms` numbers of `digits` digits, GSM8K (shipped), or a JSONL file of your own.
    c.data = config_dict.ConfigDict()
    c.data.name = "sums"
    c.data.path = ""
    c.data.prompt_column = "prompt"
    c.data.answer_column = "answer"
    c.data.digits = 1
    c.data.terms = 2
    c.data.size = 1000
    c.data.split = "train"
    c.data.template = config_dict.placeholder(str)
    c.data.system = config_dict.placeholder(str)
    c.data.chat = True
    c.data.max_prompt_length = 64
    c.data.too_long = "drop"
    c.data.shuffle = True

    # Rollout: group_size completions of each prompt. Temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 switch a filter off.
    c.rollout = config_dict.ConfigDict()
    c.rollout.prompts_per_step = 8
    c.rollout.group_size = 8
    c.rollout.max_new_tokens = 32
    c.rollout.temperature = 1.0
    c.rollout.top_k = 0
    c.rollout.top_p = 1.0
    c.rollout.min_p = 0.0
    c.rollout.stop_strings = ()
    c.rollout.fixed_length = False

    # Reward: how a completion is compared with the answer.
    c.reward = config_dict.ConfigDict()
    c.reward.name = "last_number"

    # Algorithm: advantage, surrogate, KL to the reference, correction of the rollout mismatch, DAPO's extras.
    c.algorithm = config_dict.ConfigDict()
    c.algorithm.advantage = "grpo"
    c.algorithm.objective = "grpo"
    c.algorithm.aggregation = "token_mean"
    c.algorithm.clip_low = 0.2
    c.algorithm.clip_high = 0.2
    c.algorithm.kl_coefficient = 0.0
    c.algorithm.kl_estimator = "k3"
    c.algorithm.kl_place = "loss"
    c.algorithm.correction = "none"
    c.algorithm.correction_level = "token"
    c.algorithm.correction_cap = 2.0
    c.algorithm.dynamic_sampling = False
    c.algorithm.dynamic_sampling_rounds = 4
    c.algorithm.overlong_penalty = 0.0
    c.algorithm.overlong_buffer = 0
    c.algorithm.mask_truncated = False

    # Optimizer: AdamW after a clip of the global norm.
    c.optimizer = config_dict.ConfigDict()
    c.optimizer.learning_rate = 1e-6
    c.optimizer.schedule = "constant"
    c.optimizer.warmup_steps = 0
    c.optimizer.b1 = 0.9
    c.optimizer.b2 = 0.999
    c.optimizer.eps = 1e-8
    c.optimizer.weight_decay = 0.0
    c.optimizer.max_grad_norm = 1.0

    # Train, the update step (`update` is a method of ConfigDict): sequences in a micro-batch, what the backward pass computes again,
    # vocabulary columns held at a time.
    c.train = config_dict.ConfigDict()
    c.train.micro_batch = 8
    c.train.remat = "block"
    c.train.vocab_chunk = 4096

    # Evaluation: how many held-out prompts are sampled before and after training (0: none), and of which split.
    c.evaluation = config_dict.ConfigDict()
    c.evaluation.prompts = 0
    c.evaluation.split = "test"

    # Checkpoints: every so many steps (0: at the end alone), how many are kept, and whether a run found in `out` goes on.
    c.checkpoint = config_dict.ConfigDict()
    c.checkpoint.every = 50
    c.checkpoint.keep = 2
    c.checkpoint.resume = True
    return c.lock()
