"""The end of a run that memory cannot hold: said clearly, with a checkpoint and an exit code for relaunchers."""

EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: the run may be started again


class TrainingOutOfMemory(SystemExit):
    """Training cannot go on: not even one sample fits, or processes that wait for each other cannot recover.

    Left alone it ends the process with exit code 75, without a traceback.

    Attributes:
        report: what is written to oom_report.json.
    """

    def __init__(self, message: str, report: dict | None = None) -> None:
        super().__init__(EXIT_CODE)
        self.message = message
        self.report = report or {}

    def __str__(self) -> str:
        return self.message
