"""Group-relative advantages: what one sample of a prompt was worth beside the other samples of the same prompt.

P prompts, G samples of each. The baseline comes from the group, so no value network is trained. Found by name in
`ADVANTAGES`; every one maps rewards [P, G] to advantages [P, G] of the same dtype.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jetrl_jax.errors import UserError

STD_EPSILON = 1e-4  # in units of the reward: far below any step of a verifiable reward, large enough to divide by


def useful_groups(rewards: jax.Array) -> jax.Array:
    """Which groups carry a learning signal: those whose samples did not all earn the same.

    DAPO (2503.14476, section 3.2, "dynamic sampling") keeps only these. Asked as max > min, not as std > 0: the mean of
    eight times 0.1 is not 0.1 in float32, and the std of such a group would be a small number instead of zero. A group
    with a NaN or infinite reward is of no use either, so that one bad score cannot poison the step.

    Args:
      rewards: [P, G].

    Returns:
      [P] bool.
    """
    finite = jnp.isfinite(rewards).all(axis=-1)  # of every reward: XLA's max may lose a NaN on the CPU
    return (jnp.max(rewards, axis=-1) > jnp.min(rewards, axis=-1)) & finite


def grpo(rewards: jax.Array) -> jax.Array:
    """(r - mean) / (std + 1e-4) of the group: DeepSeekMath 2402.03300, section 4.1.2.

    The paper does not say which std; this is the sample std (G - 1), as in TRL, verl and OpenRLHF, so that learning rates
    published with those carry over. (The population std would give advantages larger by sqrt(G / (G - 1)).)

    Args:
      rewards: [P, G], G at least 2.

    Returns:
      [P, G]; exactly 0 in groups that are not `useful_groups`.

    Raises:
      UserError: with one sample for each prompt.
    """
    centred = dr_grpo(rewards)
    variance = jnp.sum(centred * centred, axis=-1, keepdims=True) / (rewards.shape[-1] - 1)
    return centred / (jnp.sqrt(variance) + STD_EPSILON)


def dr_grpo(rewards: jax.Array) -> jax.Array:
    """r - mean of the group, not divided by its std: Dr. GRPO 2503.20783, section 3.2 (no bias towards easy or hard prompts).

    Args and errors as in `grpo`; G = 1 is refused because its only advantage is 0 and nothing would ever be learned.
    """
    _check_group(rewards)
    centred = rewards - jnp.mean(rewards, axis=-1, keepdims=True)
    return jnp.where(useful_groups(rewards)[:, None], centred, 0)


def rloo(rewards: jax.Array) -> jax.Array:
    """r - mean of the other samples' rewards, an unbiased baseline: REINFORCE leave-one-out, 2402.14740; equals G/(G-1) times `dr_grpo`.

    Args and errors as in `grpo`.
    """
    _check_group(rewards)
    others = (jnp.sum(rewards, axis=-1, keepdims=True) - rewards) / (rewards.shape[-1] - 1)
    return jnp.where(useful_groups(rewards)[:, None], rewards - others, 0)


def _check_group(rewards: jax.Array) -> None:
    if rewards.ndim != 2:
        raise ValueError(f"rewards must be [P, G], got shape {rewards.shape}")
    if rewards.shape[-1] < 2:
        raise UserError(
            f"rollout.group_size is {rewards.shape[-1]}: a group-relative advantage compares samples of one prompt, set it to 2 or more"
        )


ADVANTAGES: dict[str, Callable[[jax.Array], jax.Array]] = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo}
