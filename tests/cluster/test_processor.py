"""Processors and GPUs are recognized by the names that the system reports."""

from pathlib import Path

import pytest

from meshwright.cluster.gpus import Gpu, parse_listing
from meshwright.cluster.processor import memory_bytes, read_processor

XEON = """processor : 0
model name : Intel(R) Xeon(R) Platinum 8480+
flags : fpu avx2 avx512f avx512_bf16 amx_bf16 amx_tile amx_int8
"""
UNKNOWN = "processor\t: 0\nmodel name\t: Acme(R) Fast(TM) CPU 9 @ 3.00GHz\nflags\t\t: fpu sse2 avx2\n"
ARM = "processor : 0\nFeatures : fp asimd asimdhp asimddp\nCPU implementer : 0x41\nCPU part : 0xd0c\n"


@pytest.mark.parametrize(
    ("text", "name", "instructions"),
    [
        (XEON, "Xeon-8480", {"avx2-fp32", "avx512-fp32", "avx512_bf16-bf16", "amx-bf16", "amx-int8"}),
        (UNKNOWN, "Acme Fast  9", {"avx2-fp32"}),
        (ARM, "Neoverse-N1", {"neon-fp32", "neon-fp16", "dotprod-int8"}),
    ],
)
def test_a_processor_is_recognized_from_cpuinfo(tmp_path: Path, text: str, name: str, instructions: set[str]) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    processor = read_processor(tmp_path / "cpuinfo")
    assert (processor.name, set(processor.instructions)) == (name, instructions)


def test_a_machine_without_cpuinfo_has_a_name(tmp_path: Path) -> None:
    assert read_processor(tmp_path / "missing").name
    assert memory_bytes() > 2**20


def test_the_listing_of_nvidia_smi_is_parsed() -> None:
    text = "NVIDIA H200, 143771, 4\nNVIDIA H200, 143771, [N/A]\n"
    assert parse_listing(text) == [
        Gpu("NVIDIA H200", 143771 * 2**20, 4 * 2**20),
        Gpu("NVIDIA H200", 143771 * 2**20, 0),
    ]
    assert parse_listing("") == []
