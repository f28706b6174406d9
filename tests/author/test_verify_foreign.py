"""Foreign kernels: what is asked of a file, and what becomes of one that answers something else."""

from __future__ import annotations

from pathlib import Path

import pytest

from codetta.author.sandbox import run_foreign
from codetta.author.task import Workload, find

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # torch's forward mode
TASK = find("bias_gelu_mask")
SIZE = Workload(5, 8, 4, "float32")
CORRECT = Path(__file__).parent / "cheats" / "foreign" / "correct.py"
HEAD = f"{CORRECT.read_text(encoding='utf-8')}\nkernel = run\n"


def judged(tmp_path, body, **options):
    file = tmp_path / "kernel.py"
    file.write_text(HEAD + body)
    return run_foreign(file, TASK, [SIZE], seed=1, **options)


def test_a_right_kernel_is_timed_in_a_process_of_its_own():
    ran = run_foreign(CORRECT, TASK, [SIZE], seed=1, rounds=2)
    assert ran.passed and [s.name for s in ran.stages] == ["start", "verify", "time"]
    (times,) = ran.times_ms.values()
    assert len(times) == 2 and min(times) > 0


def test_a_file_that_is_not_there_is_said_to_be_so(tmp_path):
    ran = run_foreign(tmp_path / "none.py", TASK, [SIZE], seed=1)
    assert not ran.passed and ran.stages[0].facts["guard"] == "file"


@pytest.mark.usefixtures("warm_processes")
@pytest.mark.parametrize(
    ("body", "guard", "said"),
    [
        ("raise ValueError('at the top')", "raised", "ValueError: at the top"),
        ("del run", "raised", "defines no function run"),
        ("def run(a, b, **o): return o['nothing']", "raised", "KeyError"),
        ("def run(a, b, **o): return 3", "type", "is a int"),
        ("def run(a, b, **o): return kernel(a, b, **o), a.clone()", "outputs", "as many tensors"),
        ("def run(a, b, **o): return kernel(a, b, **o)[:1].clone()", "shape", "its outputs are"),
        ("def run(a, b, **o): return kernel(a, b, **o).double()", "shape", "its outputs are"),
        ("def run(a, b, **o): return kernel(a, b, **o).view(torch.int32)", "shape", "int32"),
        ("def run(a, b, **o): return kernel(a, b, **o).t().contiguous().t()", "", ""),
        ("def run(a, b, **o): return {'y': kernel(a, b, **o)}", "", ""),
    ],
)
def test_what_a_kernel_returns(tmp_path, body, guard, said):
    ran = judged(tmp_path, body)
    if not guard:
        assert ran.passed, ran.stages
        return
    (stage,) = ran.stages
    assert stage.facts["guard"] == guard and said in stage.reason
    assert not ran.times_ms


@pytest.mark.usefixtures("warm_processes")
def test_a_kernel_that_does_not_come_back_is_not_waited_for(tmp_path):
    body = "import time\ndef run(a, b, **o): time.sleep(60)"
    (stage,) = judged(tmp_path, body, timeout_s=1.0).stages
    assert stage.facts["guard"] == "timeout"


@pytest.mark.usefixtures("warm_processes")
def test_a_product_of_the_library_is_right_where_no_kernel_is_claimed(tmp_path):
    body = (
        "def run(a, b, bias, keep):\n"
        "    x = (a.float() @ b.float()) + bias\n"
        "    return (torch.nn.functional.gelu(x) * keep).to(a.dtype)"
    )
    assert judged(tmp_path, body, kernel=False).passed
    assert judged(tmp_path, body).stages[0].facts["guard"] == "products"


@pytest.mark.usefixtures("warm_processes")
def test_tasks_of_several_outputs_are_judged_by_name(tmp_path):
    task = find("batch_norm_partials")
    file = tmp_path / "kernel.py"
    source = (
        "def run(a, b, bias):\n"
        "    x = (a.double()[:, :, None] * b.double()).sum(1) + bias\n"
        "    return {'square_mean': x.square().mean(0).float(), 'x': x.to(a.dtype),\n"
        "            'mean': x.mean(0).float()}\n"
    )
    file.write_text(source)
    assert run_foreign(file, task, [SIZE], seed=2).passed
    file.write_text(source.replace("'mean': x.mean(0)", "'mean': x.sum(0)"))
    (stage,) = run_foreign(file, task, [SIZE], seed=2).stages
    assert stage.reason.startswith("mean is") and stage.worst[0].tensor == "mean"
