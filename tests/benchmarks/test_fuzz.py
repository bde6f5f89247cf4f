"""`python -m benchmarks.fuzz`: its cases are those of their seeds, and it says which results are wrong.

Covers: the draw of cases; the comparison, with XLA in the place of the kernels, right and planted wrong.
"""

from typing import Any, cast

import pytest

from benchmarks.fuzz import cases, oracle

pytestmark = pytest.mark.more

SEEDS = range(300)


def test_cases_are_of_every_kind():
    """Breaks if a seed names another case in another process, or a kind of block is never drawn."""
    drawn = [cases.draw(seed) for seed in SEEDS]
    assert drawn == [cases.draw(seed) for seed in SEEDS]
    for name, kinds in (
        ("recipe", 3),
        ("way", 3),
        ("routing", 3),
        ("buffer_factor", 6),
        ("quantized", 2),
        ("remat", 2),
    ):
        assert len({getattr(case, name) for case in drawn}) == kinds, name
    configs = [case.config for case in drawn]
    assert len({c.activation for c in configs}) == len((*cases.GATED, *cases.UNGATED))
    assert {c.weights_at for c in configs} == {"output", "input"}
    widths = {width for c in configs for width in (c.d_model, c.d_ff)}
    assert widths >= {32 * n for n in range(1, 17)} and max(widths) == 4096
    assert max(c.num_experts for c in configs) > 200 and max(case.tokens for case in drawn) > 3000


@pytest.mark.loose
@pytest.mark.parametrize("seed", [9, 26])
def test_a_wrong_gradient_is_seen(seed):
    """Breaks if a gradient of zeros passes, a right one does not, or a draw compiles again; bf16, and a vmap in FP8."""
    case = cases.draw(seed, tiny=True)
    programs = oracle.make_programs(case, "xla")
    for index in range(2):
        inputs = cases.make_inputs(case, index)[1]
        right, errors = oracle.check(case, programs, inputs)
        assert right, errors
    assert cast(Any, programs.ours)._cache_size() == 1

    def without_gradient(inputs):
        return (results := programs.ours(inputs)) | dict(wi=0 * results["wi"])

    wrong, errors = oracle.check(case, programs._replace(ours=without_gradient), inputs)
    assert not wrong and errors["wi"][0] == 1.0 > errors["wi"][1]
