"""benchmarks/report.py: the page says what the records say, in the repository too."""

import json

import pytest
import report
from sample_records import BENCHMARKS, cold_record, kernels_record, layer_record


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
