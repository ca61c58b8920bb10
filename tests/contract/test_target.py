from types import SimpleNamespace

import pytest
import torch

from registry import InvalidArgument, Target
from registry.contract.target import _cuda_target, known_names


@pytest.mark.parametrize("name", ["sm80", "sm86", "sm89", "sm90", "sm100", "sm120", "cpu"])
def test_architectures_can_be_named(name):
    assert Target.named(name).arch == name


@pytest.mark.parametrize(
    ("name", "arch"),
    [
        ("H100", "sm90"),
        ("nvidia h200", "sm90"),
        ("A100", "sm80"),
        ("RTX 3090", "sm86"),
        ("GeForce RTX 4090", "sm89"),
        ("rtx-5090", "sm120"),
        ("NVIDIA H100 80GB HBM3", "sm90"),  # as drivers call them
        ("NVIDIA GH200 480GB", "sm90"),
        ("NVIDIA H100 NVL", "sm90"),
        ("NVIDIA A100-SXM4-80GB", "sm80"),
        ("NVIDIA A100-PCIE-40GB", "sm80"),
        ("NVIDIA A100 80GB PCIe", "sm80"),
        ("Tesla V100-SXM2-16GB", "sm70"),
    ],
)
def test_devices_can_be_named_case_and_spaces_aside(name, arch):
    target = Target.named(name)
    assert target.arch == arch
    assert target.sm == int(arch[2:])
    assert target.sm_count > 1
    assert target.shared_memory > 90 * 1024


@pytest.mark.parametrize(("name", "gbs"), [("NVIDIA H200", 4800), ("NVIDIA H999", Target.named("sm90").memory_gbs)])
def test_a_real_card_has_the_memory_that_is_listed_or_that_of_its_kind(monkeypatch, name, gbs):
    about = {"name": name, "major": 9, "minor": 0, "multi_processor_count": 132, "shared_memory_per_block_optin": 1}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(**about))
    _cuda_target.cache_clear()
    found = Target.of(torch.device("cuda", 7))
    _cuda_target.cache_clear()
    assert (found.name, found.arch, found.memory_gbs) == (name, "sm90", gbs)


def test_a_driver_tells_cards_of_one_chip_apart():
    assert [Target.named(f"NVIDIA H100 {form}").sm_count for form in ("80GB HBM3", "PCIe")] == [132, 114]


def test_an_unknown_device_lists_the_known_ones():
    with pytest.raises(InvalidArgument) as caught:
        Target.named("H999")
    assert "'H999'" in str(caught.value)
    assert "RTX 3090" in str(caught.value)


def test_every_known_name_can_be_used():
    assert {Target.named(name).name for name in known_names()} == set(known_names())


def test_a_made_up_target_has_the_installed_toolchain():
    assert Target.named("H100").torch == torch.__version__.split("+")[0]


def test_meta_tensors_have_no_target():
    with pytest.raises(InvalidArgument, match="target="):
        Target.of(torch.device("meta"))
