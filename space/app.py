"""The page of `hf-memopt ui` as a Hugging Face Space."""

from hf_memopt.ui.limits import Limits
from hf_memopt.ui.page import build_page, launch_page

if __name__ == "__main__":
    launch_page(build_page(Limits(public=True)), "0.0.0.0", 7860)
