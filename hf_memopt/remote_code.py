"""Decide if code that comes with a model may run.

Where trust_remote_code is None, transformers asks on stdin, and a pipe may answer: every call says True or False.
"""


def is_trusted(config) -> bool:
    """True if a configuration is itself of a class that came with its model, which was loaded by the user's leave.

    transformers 5.23 imports such classes below a package of its own (utils.hub: TRANSFORMERS_DYNAMIC_MODULE_NAME).
    """
    return type(config).__module__.partition(".")[0] == "transformers_modules"
