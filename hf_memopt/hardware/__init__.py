"""Devices: the catalog of known ones and the detection of this machine's."""

from hf_memopt.hardware.allocator import configure_allocator
from hf_memopt.hardware.attention_kernels import resolve_attention
from hf_memopt.hardware.catalog import Hardware, list_hardware
from hf_memopt.hardware.detection import detect, get_hardware

__all__ = ["Hardware", "configure_allocator", "detect", "get_hardware", "list_hardware", "resolve_attention"]
