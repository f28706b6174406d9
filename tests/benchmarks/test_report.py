"""benchmarks/report.py: the page says what the records say, in the repository too."""

import json

import llama
import pytest
import report
from sample_records import BENCHMARKS, cold_record, kernels_record, layer_record, model_record


def row(text, start):
    """Cells of the only table row that begins so."""
    (found,) = (x for x in text.splitlines() if x.startswith(f"| {start} |"))
    return [c.strip() for c in found.strip("|").split("|")]


@pytest.fixture
def results(tmp_path):
    folder = tmp_path / "results"
    (folder / "day").mkdir(parents=True)
    for name, record in {
        "layer_d2048_16384": layer_record(),
        "kernels_d2048_16384": kernels_record(),
        "cold_start": cold_record(),
    }.items():
        (folder / "day" / f"{name}.json").write_text(json.dumps(record))
    return folder


def test_layer_table_has_the_medians_ratios_and_memory_of_its_record(results):
    cells = row(report.page(results), "coda")
    assert cells[1:4] == ["3.150", "7.350", "10.500"]
    assert cells[4] == "1.050 [1.050, 1.050]" and cells[5] == "1.050 [1.050, 1.050]"
    assert cells[6] == "0.833 [0.833, 0.833]" and cells[7:] == ["2.00", "4.0e-03"]


def test_aims_are_judged_by_the_numbers(results):
    text = report.page(results)
    aims = row(text, "d2048")
    assert aims[1] == "1.200 (1.07, reached)" and aims[2] == "1.050 (1.05, reached)"
    assert aims[3] == "-1.00 GiB" and aims[4] == "1.100"
    worse = results / "day" / "layer_d2048_16384.json"
    worse.write_text(json.dumps(layer_record(coda_both=12.0)))
    aims = row(report.page(results), "d2048")
    assert aims[1] == "1.050 (1.07, missed)" and aims[2] == "1.200 (1.05, missed)"


def test_newest_record_of_a_shape_counts(results):
    later = layer_record(coda_both=11.0, date="2000-01-03 00:00:00")
    (results / "layer_d2048_16384.json").write_text(json.dumps(later))
    assert row(report.page(results), "coda")[3] == "11.000"


def test_a_record_of_another_process_stands_beside_the_newest(results):
    """Further down in a run's folder, newer or not, it replaces nothing and is judged by no aim."""
    (results / "day" / "slow").mkdir()
    other = layer_record(coda_both=12.0, date="2000-01-03 00:00:00")
    (results / "day" / "slow" / "layer_d2048_16384.json").write_text(json.dumps(other))
    text = report.page(results)
    first, second = text.split("### d2048, another process:")
    assert row(first, "coda")[3] == "10.500" and row(second, "coda")[3] == "12.000"
    assert row(text, "d2048")[1] == "1.200 (1.07, reached)"


def test_of_records_of_one_date_those_in_the_last_folder_count(results):
    (results / "day-2").mkdir()
    layer, cold = layer_record(coda_both=11.0), cold_record()
    cold["runs"][0] |= {"to_first_step_s": 41.0}
    for name, record in {"layer_d2048_16384": layer, "cold_start": cold}.items():
        (results / "day-2" / f"{name}.json").write_text(json.dumps(record))
    text = report.page(results)
    assert row(text, "coda")[3] == "11.000"
    assert row(text, "cold")[1] == "41.000 (60.00, reached)"
    assert text.count("`results/day-2/") == 2 and text.count("`results/day/") == 1


def test_kernel_is_compared_with_the_faster_plain_product(results):
    text = report.page(results)
    slow, good = row(text, "down dgrad"), row(text, "output projection")
    assert slow[5] == "1.200 [1.200, 1.200]" and slow[6] == "above 1.08"
    assert good[5] == "1.050 [1.050, 1.050]" and good[6] == ""
    assert row(text, "fold")[1:] == ["8.00", "0.0030", "0.0020", "1.50"]


def test_cold_start_is_judged_by_its_aim(results):
    text = report.page(results)
    assert row(text, "cold")[1] == "61.000 (60.00, missed)"
    assert row(text, "warm")[1] == "9.500 (10.00, reached)"


@pytest.fixture
def models(tmp_path):
    """Writes records of a Llama and returns the page of all that were written."""

    def page(**records):
        for folder, record in records.items():
            file = tmp_path / folder.replace("__", "/") / f"llama_llama-1b_{record['part']}.json"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(record))
        return report.page(tmp_path)

    return page


def test_whole_models_have_a_table_per_part_with_times_ratios_memory_and_differences(models):
    text = models(day=model_record(), other=model_record(part="decoder"))
    step, decoder = text.split("\n### ")[1:]
    for found, part, output in ((step, "step", "loss"), (decoder, "decoder", "output")):
        sizes = "16 layers, d 2048, f 8192, heads 32/8, V 128256, 2 × 8192 tokens"
        assert found.startswith(f"llama-1b, {part}: {sizes}\n") and f"{output} difference" in found
        times = ["150.00", "1.500 [1.500, 1.500]", "6.00"]
        assert row(found, "eager")[1:] == [*times, "0.0e+00", "1.0e-02"]
        times = ["100.00", "1.000 [1.000, 1.000]", "2.00"]
        assert row(found, "CODA")[1:] == [*times, "2.0e-06", "4.0e-02"]
    assert "\n## Whole models\n" in text
    assert (
        "5 rounds, steps per sample: 2. M 16384; Sample GPU; torch 2.0, transformers 5.0;" in step
    )
    assert "`results/day/llama_llama-1b_step.json`" in step and "`results/other/" in decoder


def test_the_difference_of_gradients_is_not_that_of_the_output(models):
    record = model_record(part="decoder")
    record["relative_difference_to_eager"]["CODA"]["output"] = 0.05
    assert row(models(day=record), "CODA")[4:] == ["5.0e-02", "4.0e-02"]


def test_model_with_wrong_gradients_is_marked_and_has_no_time_or_ratio(models):
    nothing = ["", "wrong", ""]
    assert row(models(day=model_record()), "Liger, compiled")[1:] == [
        *nothing,
        "1.0e-06",
        "1.0e+00",
    ]
    record = model_record()
    differences = record["relative_difference_to_eager"]
    differences["Liger, compiled"] = {"first norm": llama.WRONG, "first q": 0.0, "output": 0.0}
    at_the_limit = row(models(day=record), "Liger, compiled")
    assert at_the_limit[1:4] == ["90.00", "0.900 [0.900, 0.900]", "3.00"]
    differences["Liger, compiled"]["first q"] = float("nan")
    assert row(models(day=record), "Liger, compiled")[1:4] == nothing


def test_model_that_was_found_wrong_before_it_was_timed_is_marked_too(models):
    record = model_record()
    del record["times_ms"]["Liger, compiled"], record["peak_bytes"]["Liger, compiled"]
    record["failed"] = {"Liger, compiled": "RuntimeError: wrong: relative difference"}
    text = models(day=record)
    assert row(text, "Liger, compiled")[1:4] == ["", "wrong", ""]
    assert "- Liger, compiled: failed: RuntimeError: wrong" in text


def test_nothing_is_compared_with_a_wrong_coda(models):
    record = model_record()
    record["relative_difference_to_eager"]["CODA"]["first q"] = 0.31
    text = models(day=record)
    assert row(text, "CODA")[1:4] == ["", "wrong", ""]
    assert row(text, "eager")[1:4] == ["150.00", "", "6.00"]


def test_contender_of_another_process_is_marked_and_compared_within_its_own(models):
    apart = model_record(coda=120.0, date="2000-01-03 00:00:00", rounds=4)
    text = models(day=model_record(), day__apart=apart)
    assert row(text, "eager")[1:3] == ["150.00", "1.500 [1.500, 1.500]"]
    assert row(text, "CODA")[1] == "100.00"
    assert row(text, "eager, another process")[1:3] == ["150.00", "1.250 [1.250, 1.250]"]
    assert row(text, "CODA, another process")[1] == "120.00"
    assert row(text, "Liger, compiled, another process")[2] == "wrong"
    assert "- Liger, another process: failed: AcceleratorError" in text
    said = [x for x in text.splitlines() if x.startswith("Another process: 4 rounds")]
    assert len(said) == 1 and "`results/day/apart/llama_llama-1b_step.json`" in said[0]
    assert text.count("\n### ") == 1
    del apart["times_ms"]["CODA"]
    assert row(models(day__apart=apart), "eager, another process")[1:3] == ["150.00", ""]


def test_newest_run_of_a_model_counts_with_its_own_processes_only(models):
    first = {"day": model_record(), "day__apart": model_record()}
    assert "another process" in row(models(**first), "CODA, another process")[0]
    text = models(day_2=model_record(coda=110.0))  # of the same date, in a later folder
    assert row(text, "CODA")[1] == "110.00" and "CODA, another process" not in text
    text = models(a_day=model_record(coda=120.0, date="2000-01-03 00:00:00"))
    assert row(text, "CODA")[1] == "120.00" and text.count("\n### ") == 1


def test_model_that_failed_is_named_with_a_shortened_reason(models):
    (said,) = (x for x in models(day=model_record()).splitlines() if x.startswith("- Liger:"))
    assert said.startswith("- Liger: failed: AcceleratorError: an illegal memory access said more")
    assert said.endswith(" …") and len(said) < 150


def test_seconds_of_first_steps_are_no_run_of_a_model(models, tmp_path):
    models(day=model_record())
    seconds = {"case": model_record()["case"], "environment": {"date": "2000-01-04"}}
    (tmp_path / "day" / "llama_compile_llama-1b.json").write_text(json.dumps(seconds))
    assert row(report.page(tmp_path), "CODA")[1] == "100.00"


def test_failed_contender_is_named(results):
    assert "- liger: failed: ModuleNotFoundError" in report.page(results)


def test_command_writes_the_page_and_its_plots_and_check_sees_a_changed_number(results, tmp_path):
    flags = ["--results", str(results), "--out", str(tmp_path)]
    assert report.main(flags) == 0 and report.main([*flags, "--check"]) == 0
    for name in ("layer", "kernels"):
        assert (tmp_path / "plots" / f"{name}.png").stat().st_size > 5000
    first = (tmp_path / "plots" / "layer.png").read_bytes()
    assert report.main(flags) == 0 and (tmp_path / "plots" / "layer.png").read_bytes() == first
    page = tmp_path / "RESULTS.md"
    page.write_text(page.read_text().replace("10.500", "9.500"))
    assert report.main([*flags, "--check"]) == 1


def test_page_in_the_repository_is_what_its_records_give():
    assert (BENCHMARKS / "RESULTS.md").read_text() == report.page(BENCHMARKS / "results")
