"""The table of tuned configurations: how it is made, and what a kernel finds in it."""

import dataclasses
import json

import jax.numpy as jnp
import pytest

from jetrl_jax import cli
from jetrl_jax.bench import timing, tune, works
from jetrl_jax.errors import UserError
from jetrl_jax.kernels import tuned


@dataclasses.dataclass(frozen=True)
class Config:
    tile: int
    pair: tuple[int, int] = (1, 2)


DEFAULT = {"tile": 1, "pair": (0, 0)}


@pytest.fixture
def table(tmp_path, monkeypatch):
    """Stands in for the packaged table; call it with what is to be in it."""
    path = tmp_path / "tuned.json"
    monkeypatch.setattr(tuned, "PATH", path)
    tuned._load.cache_clear()

    def put(content):
        tuned.save(content)
        return path

    yield put
    tuned._load.cache_clear()


def entry(tile):
    return {"tile": tile, "pair": [3, 4]}


def test_without_a_table_everything_is_the_default(table):
    assert tuned.lookup("gemm", 8192, 64, 64, DEFAULT) == DEFAULT


def test_a_shape_is_found_by_its_bucket_and_lists_come_back_as_tuples(table):
    table({"NVIDIA H200": {"gemm": {"8192x6144x4096": entry(7)}}})
    for m in (4097, 8192):
        assert tuned.lookup("gemm", m, 6144, 4096, DEFAULT, device="NVIDIA H200") == {"tile": 7, "pair": (3, 4)}
    assert tuned.lookup("wgrad", 8192, 6144, 4096, DEFAULT) == DEFAULT
    assert [tuned.bucket(m) for m in (0, 1, 2, 3, 64, 65)] == [1, 1, 2, 4, 64, 128]


def test_the_nearest_shape_serves_up_to_a_distance(table):
    table({"d": {"gemm": {"64x4096x4096": entry(1), "8192x4096x4096": entry(2), "8192x1024x4096": entry(3)}}})

    def tile(m, n, k):
        return tuned.lookup("gemm", m, n, k, {"tile": 0})["tile"]

    assert [tile(*s) for s in [(4096, 4096, 4096), (128, 4096, 4096), (8192, 1536, 4096), (8192, 5120, 4096)]] == [2, 1, 3, 2]
    assert tile(8192, 2048, 4096) == 2  # as far from both: the larger
    assert tile(8192, 64, 64) == 0  # like none of them
    assert tile(2**20, 4096, 4096) == 0


def test_a_neighbour_that_does_not_fit_is_passed_over(table):
    table({"d": {"gemm": {"64x4096x4096": entry(1), "128x4096x4096": entry(2)}}})
    assert tuned.lookup("gemm", 64, 4096, 4096, {"tile": 0}, fits=lambda c: c["tile"] > 1) == {"tile": 2}
    assert tuned.lookup("gemm", 64, 4096, 4096, {"tile": 0}, fits=lambda c: False) == {"tile": 0}


def test_an_older_table_serves_a_newer_kernel(table):
    table({"d": {"gemm": {"64x64x64": {"tile": 5, "gone": 1}}}})
    assert tuned.lookup("gemm", 64, 64, 64, {"tile": 0, "new": 9}) == {"tile": 5, "new": 9}


def test_a_device_that_was_never_measured_takes_the_first_ones_entries(table):
    table({"NVIDIA H200": {"gemm": {"64x64x64": entry(5)}}, "NVIDIA H100": {"gemm": {"64x64x64": entry(4)}}})
    assert [tuned.lookup("gemm", 64, 64, 64, {"tile": 0}, device=d)["tile"] for d in ("NVIDIA H200", "NVIDIA H100", "GH200")] == [5, 4, 4]


def test_what_is_found_goes_into_the_table_and_the_rest_stays(table):
    path = table({"d": {"gemm": {"64x64x64": entry(1), "8x8x8": entry(2)}}})
    tuned.save(tuned.merged({"d": {"gemm": {"8x8x8": entry(3)}, "wgrad": {"8x8x8": entry(4)}}}))
    assert json.loads(path.read_text()) == {"d": {"gemm": {"8x8x8": entry(3), "64x64x64": entry(1)}, "wgrad": {"8x8x8": entry(4)}}}
    assert tuned.lookup("gemm", 8, 8, 8, {"tile": 0}) == {"tile": 3}
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("text", ["[", "[]", '{"d": 3}', '{"d": {"gemm": {"8x8": {}}}}', '{"d": {"gemm": {"8x8x8": 3}}}'])
def test_a_broken_table_is_one_message(table, text):
    path = table({})
    path.write_text(text)
    with pytest.raises(UserError, match="not a table of tuned configurations"):
        tuned.lookup("gemm", 8, 8, 8, DEFAULT)


def test_the_packaged_table_can_be_read_and_its_shapes_are_buckets():
    for kernels in tuned.merged({}).values():
        for shapes in kernels.values():
            for name, fields in shapes.items():
                m, n, k = map(int, name.split("x"))
                assert tuned.shape_key(m, n, k) == name and fields


def fake_case(kernel="gemm", shape=(8192, 64, 32)):
    """A case whose time grows with the tile, one of whose candidates does not run."""

    def build(config):
        if config.tile == 0:
            raise ValueError("shared memory")
        x = jnp.ones((200 * config.tile, 200))
        return timing.jitted(lambda x: x @ x.T, x, operations=1)

    return tune.Case(kernel, *shape, [Config(6), Config(1, (5, 6)), Config(0)], build)


def test_the_fastest_candidate_is_kept_and_the_others_are_told():
    best, lines = tune.fastest(fake_case(), rounds=3, seconds=1e-3)
    assert best == {"tile": 1, "pair": (5, 6)}
    assert "Config(tile=1, pair=(5, 6))" in lines[0] and "Config(tile=6, pair=(1, 2))" in lines[1]
    assert lines[2] == "  not run: Config(tile=0, pair=(1, 2)): ValueError: shared memory"


@pytest.mark.parametrize("into", ["", "mine.json"])
def test_tuning_writes_the_table(table, tmp_path, monkeypatch, capsys, into):
    path = table({"toy": {"gemm": {"1x1x1": entry(9)}}})
    monkeypatch.setattr(tune.precompile, "run", lambda *a: {"done": 0, "failed": [], "seconds": 0.0})
    monkeypatch.setattr(tune, "cases", lambda *a: iter([fake_case()]))
    out = str(tmp_path / into) if into else ""
    assert tune.measure("", "", out, works.Run("c", "toy", {})) == 0
    written = json.loads((tmp_path / into if into else path).read_text())
    assert written == {"toy": {"gemm": {"1x1x1": entry(9), "8192x64x32": {"tile": 1, "pair": [5, 6]}}}}
    assert "gemm 8192x64x32" in capsys.readouterr().out
    monkeypatch.setattr(tune, "cases", lambda *a: iter([]))
    assert tune.measure("", "", out, works.Run("c", "toy", {})) == 1


def test_shapes_are_tuned_once_though_models_share_them():
    pytest.importorskip("triton")
    names = [(c.kernel, c.key) for c in tune.cases("gemm,decode", "qwen3-8b,llama-3.1-8b")]
    assert len(names) == len(set(names))
    assert ("gemm", "8192x4096x24576") in names and ("decode", "64x28672x4096") in names
    assert all(c.candidates for c in tune.cases("", "qwen3-8b"))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["bench"], "jetrl bench needs a name: kernels, tune, page"),
        (["bench", "kernel"], "unknown bench 'kernel': did you mean 'kernels'?"),
        (["bench", "kernels"], "jetrl bench kernels measures kernels: the kernels are for Hopper GPUs, and jax runs on cpu"),
        (["bench", "tune", "--only=gemm"], "jetrl bench tune measures kernels: the kernels are for Hopper GPUs"),
        (["bench", "kernels", "--only=fprop,fpop"], "unknown group in --only 'fpop': did you mean 'fprop'"),
        (["bench", "tune", "--only=fprop"], "unknown kernel in --only 'fprop'"),
        (["bench", "kernels", "--shapes", "qwen3"], "unknown model in --shapes 'qwen3': did you mean 'qwen3-8b'"),
        (["bench", "kernels", "twice"], "extra words on the command line: 'twice'"),
        (["bench", "kernels", "--seconds=-1"], "--seconds=-1"),
        (["bench", "kernels", "--owt=x"], "unknown flag --owt: did you mean --out"),
    ],
)
def test_a_mistake_is_one_message(capsys, argv, message):
    assert cli.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("jetrl: ") and err.count("\n") == 1
    assert message in err


def test_page_is_a_bench_that_needs_no_gpu(tmp_path, capsys):
    assert cli.main(["bench", "page", f"--out={tmp_path / 'p.md'}"]) == 0
    assert (tmp_path / "p.md").read_text().startswith("# Figures")
