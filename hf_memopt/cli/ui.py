"""`hf-memopt ui`: the questions of estimate and plan on a page in the browser."""

from hf_memopt.errors import InputError, one_line
from hf_memopt.packages import require
from hf_memopt.ui.limits import Limits


def run_ui(host: str, port: int, public: bool, share: bool) -> None:
    """Serve the page until it is interrupted.

    Raises:
        InputError: gradio is not installed, or the address cannot be listened at.
    """
    require("gradio", "hf-memopt ui")
    from hf_memopt.ui.page import build_page, launch_page

    try:
        launch_page(build_page(Limits(public=public)), host, port, share=share)
    except OSError as error:
        raise InputError(
            f"host={host}, port={port}: {one_line(error)}; choose another with --host or --port"
        ) from None
