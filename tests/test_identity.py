"""`verify.json`: what was checked is written down, and a difference is an error."""

import json

import numpy as np
import pytest

import sens
from analysis import identity
from analysis.records import RecordError


def test_both_sides_of_every_row_are_written(tmp_path):
    shown = []
    identity.verify(tmp_path / "deep" / "verify.json", (4, 7), rows=12, seed=3, show=shown.append)
    written = json.loads((tmp_path / "deep" / "verify.json").read_text())
    assert written["tolerance"] == 1e-13
    assert [check["length"] for check in written["checks"]] == [4, 7]
    for check, line in zip(written["checks"], shown, strict=True):
        norm, theta = np.array(check["norm"]), np.array(check["theta_over_tau"])
        assert norm.shape == theta.shape == (12,)
        np.testing.assert_allclose(np.abs(norm - theta) / theta, check["relative_error"], atol=1e-18)
        assert check["worst"] == max(check["relative_error"]) < 1e-13
        assert f"{check['worst']:.2e}" in line
        assert f"L = {check['length']:2d}" in line
    again = sens.verify_identity(7, 12, seed=3)
    assert written["checks"][1]["norm"] == again.norm.tolist()


def test_a_difference_is_an_error_and_the_numbers_are_there_to_look_at(tmp_path, monkeypatch):
    def wrong(length, rows, seed):
        check = sens.IdentityCheck(length, 1.0, np.full(rows, 0.5), np.full(rows, 0.5))
        check.norm[rows // 2] *= 1 + 1e-12
        return check

    monkeypatch.setattr(sens, "verify_identity", wrong)
    with pytest.raises(RecordError, match=r"verify.json: the two sides differ by 1.00e-12, more than 1e-13"):
        identity.verify(tmp_path / "verify.json", (8,), rows=4, show=lambda _: None)
    assert json.loads((tmp_path / "verify.json").read_text())["checks"][0]["worst"] > 1e-13


def test_a_side_that_is_not_a_number_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(
        sens,
        "verify_identity",
        lambda length, rows, seed: sens.IdentityCheck(length, 1.0, np.full(2, np.nan), np.ones(2)),
    )
    with pytest.raises(RecordError, match="differ by nan"):
        identity.verify(tmp_path / "verify.json", (8,), rows=2, show=lambda _: None)
