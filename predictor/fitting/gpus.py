"""GPUs by name, as their data sheets describe them."""

from __future__ import annotations

from dataclasses import dataclass

from predictor.suggestions import did_you_mean


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One kind of GPU: dense peaks, memory, multiprocessors, and bytes per second to other GPUs."""

    flops: float  # of 16-bit numbers
    bandwidth: float
    memory_bytes: float
    num_sms: int
    link_bandwidth: float
    fp8_flops: float = 0.0  # 0: has no such unit
    fp4_flops: float = 0.0

    def unit_bits(self, bits: int) -> int:
        """Return the bits of the unit that multiplies numbers of so many bits: the narrowest that is wide enough."""
        if bits <= 4 and self.fp4_flops:
            return 4
        return 8 if bits <= 8 and self.fp8_flops else 16

    def peak(self, bits: int) -> float:
        """Return the peak for products of numbers of so many bits."""
        return {4: self.fp4_flops, 8: self.fp8_flops, 16: self.flops}[self.unit_bits(bits)]


# From the vendors' data sheets; links are NVLink where available, else PCIe, in one direction.
GPUS = {
    "A10": Gpu(flops=125e12, bandwidth=600e9, memory_bytes=24e9, num_sms=72, link_bandwidth=32e9),
    "A30": Gpu(flops=165e12, bandwidth=933e9, memory_bytes=24e9, num_sms=56, link_bandwidth=100e9),
    "A40": Gpu(flops=150e12, bandwidth=696e9, memory_bytes=48e9, num_sms=84, link_bandwidth=56e9),
    "A100-40G": Gpu(flops=312e12, bandwidth=1555e9, memory_bytes=40e9, num_sms=108, link_bandwidth=300e9),
    "A100": Gpu(flops=312e12, bandwidth=2039e9, memory_bytes=80e9, num_sms=108, link_bandwidth=300e9),
    "H100": Gpu(
        flops=989e12, fp8_flops=1979e12, bandwidth=3350e9, memory_bytes=80e9, num_sms=132, link_bandwidth=450e9
    ),
    "H100-PCIE": Gpu(
        flops=756e12, fp8_flops=1513e12, bandwidth=2000e9, memory_bytes=80e9, num_sms=114, link_bandwidth=64e9
    ),
    "H200": Gpu(
        flops=989e12, fp8_flops=1979e12, bandwidth=4800e9, memory_bytes=141e9, num_sms=132, link_bandwidth=450e9
    ),
    "H20": Gpu(flops=148e12, fp8_flops=296e12, bandwidth=4000e9, memory_bytes=96e9, num_sms=78, link_bandwidth=450e9),
    "B200": Gpu(
        flops=2250e12,
        fp8_flops=4500e12,
        fp4_flops=9000e12,
        bandwidth=8000e9,
        memory_bytes=180e9,
        num_sms=148,
        link_bandwidth=900e9,
    ),
    "L4": Gpu(flops=121e12, fp8_flops=242e12, bandwidth=300e9, memory_bytes=24e9, num_sms=58, link_bandwidth=32e9),
    "L40S": Gpu(flops=362e12, fp8_flops=733e12, bandwidth=864e9, memory_bytes=48e9, num_sms=142, link_bandwidth=32e9),
    "RTX-PRO-6000": Gpu(
        flops=500e12,
        fp8_flops=1000e12,
        fp4_flops=2000e12,
        bandwidth=1792e9,
        memory_bytes=96e9,
        num_sms=188,
        link_bandwidth=64e9,
    ),
    "RTX-4090": Gpu(
        flops=165e12, fp8_flops=330e12, bandwidth=1008e9, memory_bytes=24e9, num_sms=128, link_bandwidth=32e9
    ),
}
NOISE = ("nvidia", "geforce", "blackwell", "server edition", "sxm5", "sxm4", "sxm", "80gb", "-", "_", " ")


def gpu_named(name: str) -> Gpu:
    """Return a GPU by its name, in any usual spelling."""
    by_key = {gpu_key(known): known for known in GPUS}
    key = gpu_key(name)
    if key not in by_key:
        hint = did_you_mean(name, GPUS, f"; there are {', '.join(GPUS)}")
        raise ValueError(f"gpu: {name!r} is not known{hint}")
    return GPUS[by_key[key]]


def gpu_key(name: str) -> str:
    """Return the distinguishing part of a GPU's name."""
    plain = name.lower()
    for noise in NOISE:
        plain = plain.replace(noise, "")
    return plain
