"""Import before transformers where torchvision lies in a folder of its own: its operators' declarations.

The wheel's operators may be a CUDA build's; its Python, all that video processors use, wants two declared.
"""

from torch import library

DECLARED = library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    DECLARED.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
