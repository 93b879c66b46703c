"""What is read from compiled programs."""

from dflash_jax.benchmarks.compiled import launches


def test_what_a_gpu_starts(tmp_path):
    """As XLA lists it: a graph with a condition in it, a loop for which the host waits, and another graph."""
    listed = """\
000: kCommandBuffer [source       | next=005 (1)]
    001: kCustomKernel [source       | next=002 (1)] fusion grid: [1, 1, 1]
    002: kConditional   [prev=001 (1) | next=003 (1)]
      branch_0:
        No thunks.      branch_1:
        003: kCopy         [source | sink] kCopy
    004: kCopy         [prev=002 (1) | sink        ] kCopy
005: kWhile   [prev=000 (1) | next=000 (1)]
condition:
          body:
            006: kCustomKernel [source | sink] fusion
000: kCommandBuffer [prev=005 (1) | sink        ]
    007: kCustomCall   [source | sink] kCustomCall
"""
    assert launches(tmp_path) is None
    (tmp_path / "module_0001.jit_step.thunk_sequence_after_thunk_passes.txt").write_text(listed)
    expected = {"kernels": 4, "conditional_kernels": 1, "graphs": 2, "host_decisions": 1}
    assert launches(tmp_path) == expected
