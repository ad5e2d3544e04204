"""Texts are read by their most frequent labels, or with a pattern."""

import json
import re
from contextlib import suppress
from pathlib import Path
from pprint import pformat
from time import process_time

import pytest

from optaxclip._logs.files import read_log
from optaxclip.replay import read_history

# As these programs print them, with numbers of our own.
TEXTS = {
    "llm.c": "s:{step} trl:{loss} lr:0.000001 norm:{norm}",
    "Megatron": " iteration {step}/ 500 | lm loss: {loss} | grad norm: {norm} | 0 |",
    "mmengine": (
        "2023/06/05 20:09:42 - mmengine - INFO - Iter(train) [{step}/900]  lr: 1.0e-3  "
        "grad_norm: {norm}  loss: {loss}"
    ),
    "a loop": "step {step} loss={loss} grad_norm={norm} (5.1 ms)",
    "a table of bars": "Step {step} | Loss: {loss} | LR: 3e-04 | GradNorm: {norm} |",
    "equal signs": "[train] step = {step}, loss = {loss}, gnorm = {norm}, tokens = 512",
    # In colors, as on a screen.
    "torchtitan": (
        "[titan] INFO \x1b[31mstep: {step:2}  \x1b[32mloss: {loss:7.4f}  "
        "\x1b[38;2;180;60;0mgrad_norm: {norm:7.4f}  \x1b[34mtps: 8,000\x1b[39m"
    ),
    "OLMo": (
        "[step={step}/99]\n    optim/total_grad_norm={norm}\n"
        "    train/CrossEntropyLoss={loss}"
    ),
    "a sentence": "step {step}: the loss {loss} has a global norm {norm}.",
    "detectron2": "iter: {step}  total_loss: {loss}  loss_cls: 1.2  grad_norm: {norm}",
    "Swin": (
        "INFO Train: [0/300][{step}/1251]\tloss {loss} (6.9)\tgrad_norm {norm} (inf)\t"
        "loss_scale 65536.0000 (65536.0000)"
    ),
    "words behind a label": (
        "step {step} | loss {loss} | loss scale 65536 | grad_norm {norm} | "
        "grad_norm clipped 1.0"
    ),
    "bars": "step {step} | loss {loss} | |g|: {norm}",
    "double bars": "step {step} loss {loss} ||grad|| {norm}",
    "Lightning": (
        "\rEpoch 0: 10%|# | {step}/40 [00:01<00:02, 9.1it/s, train_loss={loss}, "
        "grad_2.0_norm_total={norm}]"
    ),
    "litgpt": "iter {step} | loss train: {loss}, val: n/a | grad norm: {norm}",
    "lerobot": "step:{step} smpl:2K loss:{loss} grdn:{norm} lr:1e-5 updt_s:0.210",
    "stable-baselines": (
        "| total_timesteps | {step} |\n| grad_norm       | {norm} |\n"
        "| loss            | {loss} |"
    ),
}


@pytest.fixture
def text_file(tmp_path):
    def write(line, noise="INFO saved a checkpoint"):
        lines = ["git status", "Python 3.11"]
        for step in range(40):
            numbers = {"step": step, "loss": 9 - step / 8, "norm": 1.5 + step % 3}
            lines.append(line.format(**numbers))
            lines += [noise] * (step % 10 == 0)
        path = tmp_path / "run.log"
        path.write_text("\n".join(lines))
        return path

    return write


def pattern_of(path):
    """The pattern that the note shows."""
    (note,) = read_log(path, "read_history").notes
    return re.match(r"The text is read with --pattern '(.*)' \(in", note)[1]


@pytest.mark.parametrize("program", TEXTS)
def test_a_text_is_read_and_its_pattern_said(program, text_file):
    path = text_file(TEXTS[program])
    pattern = pattern_of(path)
    norms = [1.5 + step % 3 for step in range(40)]
    with pytest.warns(UserWarning, match="The text is read with --pattern"):
        assert read_history(path).tolist() == norms
    assert read_history(path, pattern=pattern).tolist() == norms
    losses = read_history(path, "loss", pattern=pattern)
    assert losses.tolist() == [9 - step / 8 for step in range(40)]


def test_few_numbers_among_losses_and_norms_are_no_log(tmp_path):
    path = tmp_path / "notes.txt"
    line = "step 3: loss=1.2 grad_norm=0.5\n"
    shown = "Such text needs a pattern .* --pattern 'loss=.*grad_norm=.* finds "
    for text in (
        2 * line,
        5 * line + 5 * "the loss fell\n",
        "lr: 0.1\nloss=3.0\ngrad_norm=2.0\nmax_grad_norm: 1.0\nseed: 1\n",
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=shown.replace("loss=.*", ".*loss=.*")):
            read_history(path)
    path.write_text(3 * line + 2 * "the loss fell\n")
    assert pattern_of(path).startswith("step")


def test_documents_and_programs_are_no_logs():
    root = Path(__file__).parents[2]
    programs = root.glob("optaxclip/**/*.py")
    documents = root.glob("docs/*.md")
    for path in (root / "README.md", root / "pyproject.toml", *programs, *documents):
        notes: list[str] = []
        # Some have a table, or a dict.
        with suppress(ValueError):
            notes = read_log(path, "read_history").notes
        assert not any("The text is read" in note for note in notes)


def test_a_group_without_a_name_is_the_norm(text_file):
    path = text_file(TEXTS["llm.c"])
    assert read_history(path, pattern=r"norm:(\S+)")[:3].tolist() == [1.5, 2.5, 3.5]


def test_a_norm_is_looked_for_where_other_lines_are_more_frequent(text_file):
    path = text_file(TEXTS["a loop"], noise="\n".join(9 * ["eval 3 loss 2.5"]))
    assert "grad_norm" in pattern_of(path)


def test_a_rate_is_no_step(text_file):
    path = text_file("epoch {step} | loss: {loss} | norm: {norm} | tokens/s: 512")
    assert "step" not in pattern_of(path)


def test_other_losses_do_not_replace_the_loss(text_file):
    """nanoGPT prints them now and then."""
    path = text_file(
        "iter {step}: loss {loss}, time 9.00ms, norm {norm}",
        noise="step 250: train loss 4.2, val loss 4.3, Validation loss 4.4",
    )
    found = read_history(path, "loss", pattern=pattern_of(path))
    assert found.tolist() == [9 - step / 8 for step in range(40)]


def test_without_a_norm_the_pattern_is_said(text_file):
    line = "Epoch 0: {step}it, loss={loss}, gn={norm}"
    with pytest.raises(ValueError, match=r"no gradient norm.* read with --pattern 'lo"):
        read_history(text_file(line))


def test_a_rate_is_read_where_most_lines_have_one(text_file):
    line = "step {step} | loss {loss} | learning rate: 3.0E-04 | norm {norm}"
    path = text_file(line)
    rates = read_history(path, "lr", pattern=pattern_of(path))
    assert rates.tolist() == 40 * [3e-4]
    line = "step {step} | loss {loss} | norm {norm}"
    assert "lr" not in pattern_of(text_file(line, noise="lr 3e-4"))


def test_steps_that_other_lines_name_are_not_proposed(text_file):
    path = text_file("({step}) grad_norm={norm}", noise="saved step 10")
    pattern = pattern_of(path)
    assert pattern.startswith("grad_norm=")
    assert len(read_history(path, pattern=pattern)) == 40


def test_the_most_frequent_labels_are_proposed(text_file):
    path = text_file(TEXTS["a loop"])
    path.write_text(f"loss: 9.5, norm: 3\n{path.read_text()}\nloss: 2.5, norm: 3")
    pattern = pattern_of(path)
    assert "loss=\\s" in pattern and "grad_norm=\\s" in pattern


def test_settings_that_are_printed_as_a_dict_hide_no_text(text_file):
    path = text_file(TEXTS["a loop"])
    settings = "{'lr': 0.1, 'loss': 'mse', 'max_grad_norm': 1.0}\n"
    path.write_text(settings + path.read_text())
    assert len(read_history(path, pattern=pattern_of(path))) == 40


def test_a_log_may_have_messages_with_a_loss(tmp_path):
    path = tmp_path / "log.jsonl"
    rows = [{"message": "loss 2.5", "length": float(step)} for step in range(40)]
    path.write_text("\n".join(map(json.dumps, rows)))
    assert read_history(path, "length").tolist() == list(range(40))


@pytest.mark.parametrize(
    "label",
    [
        "iteration {step}/ 500",
        "Iter [{step}/500]",
        "Step [{step:2}/500]",
        "it {step:05}/00500",
        "global_step={step}",
        "num_updates={step}",
        "steps: {step}",
        # Numbers in front of a total.
        "[epoch 1/3] batch {step}/500",
        "Epoch [1][{step:2}/500]",
        "2026/01/02 [Train] 10%|# | {step}/500 [00:01<00:02, 1.1it/s]",
        # Times and shares are none.
        "step: 1172.5 | iteration {step}/500",
        "Steps: 10%|# | {step}/500 [00:01<00:02]",
    ],
)
def test_a_step_is_a_number(text_file, label):
    noise = "number of nan iterations: 0"
    path = text_file(f"{label} | loss: {{loss}} | norm: {{norm}} | {noise} |")
    # Under another name, so that it is a column as well.
    pattern = pattern_of(path).replace("<step>", "<place>")
    assert read_history(path, "place", pattern=pattern).tolist() == list(range(40))


@pytest.mark.parametrize(
    "step", ["[{step:3}/400]", "I0102 03:04:05.0 9 logging_writer.py:48] [{step}]"]
)
def test_lines_may_begin_with_a_step_in_brackets(text_file, step):
    path = text_file(f"{step} loss={{loss}}, norm={{norm}}")
    pattern = pattern_of(path).replace("<step>", "<place>")
    assert read_history(path, "place", pattern=pattern).tolist() == list(range(40))
    # These are epochs.
    path.write_text(re.sub(r"\[ *\d+", "[3", path.read_text()))
    assert "step" not in pattern_of(path)


def test_a_count_that_rises_and_falls_is_no_step(tmp_path):
    path = tmp_path / "run.log"
    lines = [f"loss {9 - i} norm 2.5, {i * 17 % 40}/64 right" for i in range(9)]
    path.write_text("\n".join(lines))
    assert "step" not in pattern_of(path)


def test_steps_that_are_not_whole_are_left_out(text_file):
    """lerobot prints 2000 as 2K."""
    assert "step" not in pattern_of(text_file("step:{step}K loss:{loss} grdn:{norm}"))


def test_a_line_may_have_several_steps(tmp_path):
    path = tmp_path / "run.log"
    step = "step {}: loss {} norm {}. ".format
    lines = [step(i, 9 - i, i) + step(i + 1, 8 - i, i + 1) for i in (0, 2, 4)]
    path.write_text("\n".join(lines))
    log = read_log(path, "read_history")
    for name, numbers in (("grad_norm", [*range(6)]), ("loss", [9, 8, 7, 6, 5, 4])):
        assert log.columns[name].values.tolist() == numbers
        assert log.columns[name].steps.tolist() == [*range(6)]


def test_a_number_may_take_the_place_of_blanks(tmp_path):
    path = tmp_path / "run.log"
    norms = [12.0, 15.0, 2.5, 12.0, float("nan")]
    path.write_text("\n".join(f"loss 2.5 norm={norm:6.3f}" for norm in norms))
    with pytest.warns(UserWarning, match="The text is read with"):
        assert str(read_history(path).tolist()) == str(norms)


def test_commas_between_thousands_do_not_end_a_number(tmp_path):
    path = tmp_path / "run.log"
    norms = [1.5, 12345.5, 1234567.25]
    for line in ("loss 2.5 norm {:,.2f}", "loss 2.5,norm {:,.2f}, 5 ms"):
        path.write_text("\n".join(map(line.format, norms)))
        assert read_log(path, "test").columns["grad_norm"].values.tolist() == norms
    path.write_text("\n".join(f"loss {x:,.1f}" for x in (1234.5, 2345.5, 1200.5)))
    assert read_log(path, "test").columns["loss"].values[0] == 1234.5
    # Without a point this may be a decimal comma.
    path.write_text("step;norm\n0;1,5\n1;2,500\n")
    assert read_history(path).tolist() == [1.5, 2.5]
    path.write_text('step,norm\n0,1.5\n1,"1,234.50"\n2,"1,234"\n')
    with pytest.warns(UserWarning, match="Text is left out. Entries: 1, '1,234'"):
        assert read_history(path).tolist() == [1.5, 1234.5]


def test_decimal_commas_are_read_as_points(tmp_path):
    path = tmp_path / "run.log"
    lines = [f"step {step} loss 2,5, norm 0,{step}" for step in range(10, 50)]
    path.write_text("\n".join(lines))
    log = read_log(path, "read_history")
    assert log.columns["loss"].values.tolist() == [2.5] * 40
    norms = [step / 100 for step in range(10, 50)]
    assert log.columns["grad_norm"].values.tolist() == norms
    assert "Commas between digits are read as decimal points." in log.notes
    pattern = r"loss (?P<loss>\d),(?P<tenths>\d)"
    log = read_log(path, "read_history", pattern=pattern)
    assert log.columns["tenths"].values.tolist() == [5.0] * 40 and log.notes == []


@pytest.mark.parametrize("pattern", [None, r"norm (?P<grad_norm>\S+)"])
def test_commas_between_thousands_are_left_out(tmp_path, pattern):
    path = tmp_path / "run.log"
    norms = [850, 920, 1250, 870, 12400, 1000000]
    path.write_text("\n".join(f"step 1,00{i} norm {n:,}" for i, n in enumerate(norms)))
    log = read_log(path, "read_history", pattern)
    assert log.columns["grad_norm"].values.tolist() == norms
    assert "Commas between digits are read as thousands separators." in log.notes


def test_of_the_parts_of_a_pattern_only_those_that_are_needed_stay(text_file):
    path = text_file("loss {loss} grad norm {norm}", noise="val loss 3.0")
    assert r"\bloss\s+(?P<loss>\S*\w)|grad" in pattern_of(path)


def test_a_text_may_have_nan_from_its_first_line_on(tmp_path):
    path = tmp_path / "run.log"
    lines = [f" iteration {step}/ 500 | grad norm: nan | bad: 0 |" for step in range(9)]
    path.write_text("\n".join(lines))
    pattern = r"iteration\s+(?P<step>\d+)|grad\s*norm:\s*(?P<grad_norm>\S*\w)"
    assert pattern_of(path) == pattern


def test_norms_of_other_things_are_no_gradient_norms(text_file):
    """Megatron prints that of the weights."""
    others = "update norm: 0.1 | Clipped grad norm: 1.0"
    path = text_file(f"Params norm: 315.0 | grad norm: {{norm}} | {others}")
    norms = read_history(path, pattern=pattern_of(path))
    assert norms.tolist() == [1.5 + step % 3 for step in range(40)]


def test_norms_of_two_networks_are_not_mixed(text_file):
    """verl prints numbers of NumPy, and the actor's only from some step on."""
    norms = [1.5 + step % 3 for step in range(40)]
    path = text_file("step:{step} - actor/grad norm: {norm} - critic/grad_norm:90.0")
    pattern = pattern_of(path)
    critic = read_history(path, "critic_grad_norm", pattern=pattern)
    assert critic.tolist() == 40 * [90.0]
    text = path.read_text().replace("actor/grad norm", "actor/kl", 15)
    path.write_text(re.sub(r"norm:( ?)([\d.]+)", r"norm:\1np.float64(\2)", text))
    actor = read_history(path, "actor_grad_norm", pattern=pattern_of(path))
    assert actor.tolist() == norms[15:]
    # The name of a group in a pattern may not begin with a digit.
    path = text_file("step {step} 0/grad_norm: {norm} 1/grad_norm: 90.0")
    second = read_history(path, "_1_grad_norm", pattern=pattern_of(path))
    assert second.tolist() == 40 * [90.0]


def test_a_pattern_is_as_simple_as_the_text_allows(text_file):
    line = "step {step} loss={loss} grad_norm={norm} (5.1 ms)"
    simple = r"loss=\s*(?P<loss>\S*\w)|grad_norm=\s*(?P<grad_norm>\S*\w)"
    assert pattern_of(text_file(line)).endswith(simple)
    # Another loss needs more, and so does a number without a blank behind it.
    assert "(?<!val" in pattern_of(text_file(f"val loss=2.5 {line}"))
    assert r"[-+.\w]*)\b" in pattern_of(text_file("step {step},loss={loss},lr={loss}"))


def test_steps_and_broken_norms_in_a_text_count(tmp_path):
    path = tmp_path / "run.log"
    lines = [f"iter {step}: norm nan, ok" for step in (10, 20, 30, 30)]
    path.write_text("\n".join(lines).replace("30: norm nan", "30: norm 2.5"))
    pattern = r"iter (?P<step>\d+)|norm (?P<norm>\S+)"
    with pytest.warns(UserWarning, match="Steps 30 to 30 come twice"):
        found = read_history(path, pattern=pattern)
    assert str(found.tolist()) == "[nan, nan, 2.5]"


def test_a_text_without_a_norm_or_loss_gets_no_pattern(tmp_path):
    path = tmp_path / "notes.txt"
    for text in ("Dear diary,\nit rains.", "bought 3 pears\nsold 4", "loss, norm"):
        path.write_text(text)
        with pytest.raises(ValueError, match="No line of this text has a number beh"):
            read_history(path)


def test_a_text_with_other_names_is_read_with_the_pattern_of_its_error(tmp_path):
    path = tmp_path / "run.log"
    path.write_text("it 0 GN->1.5\nit 1 GN->0.5\n")
    with pytest.raises(ValueError) as error:
        read_history(path)
    pattern = re.search("--pattern '(.*)'", str(error.value))[1]
    norms = read_history(path, pattern=pattern.replace("NAME", "GN->"))
    assert norms.tolist() == [1.5, 0.5]


def test_a_text_whose_first_lines_have_as_many_words_gets_a_pattern(tmp_path):
    path = tmp_path / "run.log"
    lines = [f"step {step} loss {9 - step}" for step in range(3)]
    path.write_text("\n".join(["Starting training now ok", *lines]))
    assert "|loss\\s+(?P<loss>" in pattern_of(path)


def test_a_wrong_pattern_is_named(text_file):
    path = text_file(TEXTS["a loop"])
    for pattern, error in (
        ("norm (", "pattern must be a regular expression with a .* got 'norm \\('"),
        (
            "norm (?P<norm>.*",
            "got .* Python says: missing \\), unterminated subpattern",
        ),
        ("norm", "pattern must be a regular expression with a group .* got 'norm'"),
        ("nrm (.*)", "pattern 'nrm \\(\\.\\*\\)' fits no line. .* --pattern '"),
    ):
        with pytest.raises(ValueError, match=error):
            read_history(path, pattern=pattern)


def test_an_empty_match_does_not_replace_a_number(tmp_path):
    path = tmp_path / "run.log"
    path.write_text("norm=1.5, norm=\nnorm=\nnorm=2.5\n")
    log = read_log(path, "test", r"norm=(?P<norm>[\d.]*)")
    assert log.columns["norm"].values.tolist() == [1.5, 2.5]
    assert log.columns["norm"].steps.tolist() == [0, 2]


def test_an_empty_dict_is_no_piece_of_text(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text('{"norm": 1.5}\n{}\n{"norm": 2.5}\n')
    assert read_history(path).tolist() == [1.5, 2.5]


def test_dicts_that_are_printed_among_text_are_read(tmp_path):
    path = tmp_path / "run.log"
    path.write_text(
        "Loading weights: 100%|###|\n"
        "{'loss': '2.5', 'grad_norm': 1.5, 'epoch': 0.1}\n"
        " 20%|##   | 10/50 [00:01<00:04]\n"
        "{'loss': nan, 'grad_norm': -inf, 'epoch': 0.2}\n"
        "{'loss': 0.5, 'grad_norm': nan, 'epoch': 0.3}\n"
    )
    with pytest.warns(UserWarning, match="outside of complete {...} are left out: 2"):
        assert str(read_history(path, "loss").tolist()) == "[2.5, nan, 0.5]"
    path.write_text('2020-01-01 | INFO | train | {"train_gnorm": "0.5"}\n')
    with pytest.warns(UserWarning, match="outside of complete {...} are left out: 1"):
        assert read_history(path).tolist() == [0.5]


def test_a_long_text_of_printed_dicts_is_read_in_seconds(tmp_path):
    """Each error of a JSON decoder counts all lines before it."""
    path = tmp_path / "run.log"
    path.write_text(50_000 * "{'loss': 2.5, 'grad_norm': 1.5}\n")
    start = process_time()
    assert len(read_log(path, "test").columns["grad_norm"].values) == 50_000
    assert process_time() - start < 25


def test_printed_dicts_may_have_several_lines(tmp_path):
    """EasyLM prints them by pprint."""
    path = tmp_path / "run.log"
    rows = [{"gradient_norm": 0.5 + i, "learning_rate": 3e-4 / 7} for i in range(5)]
    text = "\n".join(f"step {i}\n{pformat(rows[i], width=40)}" for i in range(5))
    path.write_text(text.replace("2.5", "nan"))
    with pytest.warns(UserWarning, match="outside of complete {...} are left out: 5"):
        assert str(read_history(path).tolist()) == "[0.5, 1.5, nan, 3.5, 4.5]"


def test_printed_dicts_may_have_arrays_in_them(tmp_path):
    path = tmp_path / "run.log"
    path.write_text(
        "{'norm': Array(1.5, dtype=float32), 'v': Array([1., nan], dtype=float32)}\n"
        "{'norm': np.float32(nan), 'v': array([[1., 2.],[3., -inf]], dtype=float32)}\n"
        "{'norm': 2.5, 'v': [1.0, 2.0], 'note': 'f(nan), or nan'}\n"
        "{'norm': 3.5, 'v': [1.0, nan, -inf], 'loss': (inf,)}\n"
        "{'norm': tensor(4.5), 'loss': tensor(2.5, grad_fn=<MseLossBackward0>)}\n"
    )
    assert str(read_history(path, "norm").tolist()) == "[1.5, nan, 2.5, 3.5, 4.5]"
