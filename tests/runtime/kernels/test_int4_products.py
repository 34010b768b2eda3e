"""Products with four-bit weights in Triton against their definition."""

import pytest
import torch

from bench.fake_gpu import DEVICE, fake_gpu
from bench.gpu_steps import a_machine
from slipway_runtime.kernels import int4_products
from slipway_runtime.layers.matmul_quantized import GpuInt4, Int4
from slipway_runtime.layers.quantized_weight import QuantizedWeight

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128}


def a_weight(outputs: int, inputs: int, group: int, dtype: torch.dtype, *, zeros: bool = True) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(inputs)
    codes = torch.randint(0, 16, (outputs, inputs), generator=generator, dtype=torch.uint8)
    scales = 0.01 * torch.rand(outputs, inputs // group, generator=generator)
    # GPTQ stores zeros minus one: 16 is one of them.
    wholes = torch.randint(0, 17, scales.shape, generator=generator).float()
    return QuantizedWeight(codes, scales, group, dtype, zeros=wholes if zeros else None, bits=4)


def packed(weight: QuantizedWeight, device: torch.device) -> int4_products.Packed:
    zeros = None if weight.zeros is None else weight.zeros.to(device)
    return int4_products.pack(weight.codes.to(device), weight.scales.to(device), zeros, weight.group)


@pytest.mark.capability("QZ-4", "KN-8")
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "group"),
    [
        (1, 256, 32, 128),
        (3, 1024, 45, 128),  # two tiles at once
        (16, 320, 48, 320),  # one group, which no tile of a power of two covers
        (17, 192, 70, 64),
        (65, 96, 130, 32),
        (256, 512, 64, 256),
    ],
)
def test_four_bit_weights_are_multiplied_as_their_numbers_are(rows, inputs, outputs, group, device):
    # Triton's interpreter multiplies no bfloat16.
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    weight = a_weight(outputs, inputs, group, dtype)
    assert weight.zeros is not None
    x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows)).to(dtype)

    y = int4_products.times_int4(x.to(device), packed(weight, device)).cpu()

    wide = [part.double().repeat_interleave(group, 1) for part in (weight.zeros, weight.scales)]
    exact = x.double() @ ((weight.codes.double() - wide[0]) * wide[1]).T
    tolerance = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-11
    torch.testing.assert_close(y.double(), exact, rtol=tolerance, atol=1e-3 * exact.abs().max().item())


@pytest.mark.capability("QZ-4")
@pytest.mark.parametrize("zeros", [True, False])
@pytest.mark.parametrize(("inputs", "outputs", "group"), [(256, 5, 128), (320, 3, 320), (96, 4, 32), (4096, 2, 64)])
def test_codes_become_the_numbers_that_they_mean(inputs, outputs, group, zeros, device):
    weight = a_weight(outputs, inputs, group, torch.float16, zeros=zeros)
    numbers = int4_products.numbers_of_int4(packed(weight, device), torch.float16).cpu()
    assert torch.equal(numbers, weight.dequantized())


@pytest.mark.capability("QZ-4")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("capability", "fits"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_a_gpu_reads_codes_in_decode_and_numbers_once_in_a_prompt(capability, fits, dtype):
    """torch's int4 product reads all weights again for every 16 rows of a prompt, and multiplies no float16."""
    with fake_gpu(capability) as gpu:
        codes = torch.empty(256, 512, dtype=torch.uint8, device=DEVICE)
        scales, zeros = torch.empty(2, 256, 4, device=DEVICE)
        order = torch.empty(512, dtype=torch.int64, device=DEVICE)
        weight = QuantizedWeight(codes, scales, 128, dtype, zeros=zeros, bits=4, order=order)
        assert GpuInt4.fits(weight) == fits
        assert not Int4.fits(weight), "it is not on a CPU"
        if not fits:
            return
        made = GpuInt4(weight)
        assert made.nbytes == 256 * 512 // 2 + 256 * 4 * 5
        with gpu.step() as record:
            assert made(torch.empty(256, 512, dtype=dtype, device=DEVICE)).dtype == dtype
        assert [one.name for one in record.operations] == ["index_select", "_times_int4"]
        with gpu.step() as record:
            made(torch.empty(257, 512, dtype=dtype, device=DEVICE))
        names = [one.name for one in record.operations]
        assert names[:2] == ["index_select", "_numbers_of_int4"]
        assert set(names[2:]) <= {"t", "mm", "linear"}


@pytest.mark.capability("QZ-4")
def test_weights_that_the_kernel_does_not_read_are_refused():
    with fake_gpu((9, 0)):
        codes = torch.empty(16, 96, dtype=torch.uint8, device=DEVICE)
        weight = QuantizedWeight(codes, torch.empty(16, 3, device=DEVICE), 32, torch.bfloat16, bits=4)
        assert GpuInt4.fits(weight)
        for other in (
            QuantizedWeight(codes, torch.empty(16, 6, device=DEVICE), 16, torch.bfloat16, bits=4),
            QuantizedWeight(codes, torch.empty(16, 2, device=DEVICE), 64, torch.bfloat16, bits=4),
            QuantizedWeight(codes, torch.empty(16, 3, device=DEVICE), 32, torch.float32, bits=4),
            QuantizedWeight(codes, torch.empty(16, 3, device=DEVICE), 32, torch.bfloat16),
            QuantizedWeight(codes.cpu(), torch.empty(16, 3), 32, torch.bfloat16, bits=4),
        ):
            assert not GpuInt4.fits(other)


@pytest.mark.capability("QZ-4", "KN-8")
def test_a_decode_step_reads_half_a_byte_of_each_weight_once():
    with a_machine(layers=1, rows=32, checkpoint=AWQ) as machine:
        record = machine.step([1] * 32, [100] * 32)
    products = [one for one in record.operations if one.name == "_times_int4"]
    assert len(products) == 4
    weights = sum(one.flops for one in products) / (2 * 32)
    assert weights > 5e6
    assert sum(one.needed for one in products) == weights / 2
    assert sum(one.nbytes for one in products) < 0.65 * weights, "scales, zeros and rows beside them"
