"""What is read from compiled programs."""

from benchmarks import bundles
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


def test_the_inner_loop_of_a_schedule():
    """As libtpu writes it: an address, what begins there, and a mark for each loop around it."""
    text = """\
     0   :  { %9 = vsyncpa [#allocation5], 0 }
   0x5 LB: > { %s2018_s19 = sadd.s32 4294967295, %s1900_s18 }
  0x49 LB: >> { %s1453_s26 = sshll.u32 %s1968_s19, 8 }
  0x54   : >> { %s463_s5 = sand.u32 127, %s462_s10 }
 0x1b3   : >> { %v1259_v58 = vadd.f32 %v1936_v34, %v1230_v20 }
 0x1b6 PF: > { %p17_p10 = scmp.ge.s32.totalorder %s2021_s20, 34 }"""
    lines = text.splitlines()
    assert bundles.inner_loop(lines) == 0x1B3 - 0x49 + 1
    assert bundles.branches([*lines[:2], " 0x1f8   : > { %12 = sbr.rel (%p1_p1) target = $region68 }"]) == [0x1F8]
