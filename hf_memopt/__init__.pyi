"""What type checkers read: the public names, which __init__.py imports on first use."""

from hf_memopt.contrib.merging.merge import merge_adapter as merge_adapter
from hf_memopt.errors import InputError as InputError
from hf_memopt.errors import TrainingOutOfMemory as TrainingOutOfMemory
from hf_memopt.estimator import Estimate as Estimate
from hf_memopt.estimator import estimate as estimate
from hf_memopt.estimator import estimate_trainer as estimate_trainer
from hf_memopt.estimator import list_architectures as list_architectures
from hf_memopt.hardware import detect as detect
from hf_memopt.hardware import get_hardware as get_hardware
from hf_memopt.hardware import list_hardware as list_hardware
from hf_memopt.levers.arguments import MemoryArguments as MemoryArguments
from hf_memopt.monitor.callback import MemoryCallback as MemoryCallback
from hf_memopt.monitor.monitor import MemoryMonitor as MemoryMonitor
from hf_memopt.monitor.snapshot_callback import SnapshotCallback as SnapshotCallback
from hf_memopt.oom.classify import classify_oom as classify_oom
from hf_memopt.planner.market.cards import which_card as which_card
from hf_memopt.planner.plan import plan as plan
from hf_memopt.planner.profiles import Plan as Plan
from hf_memopt.presets import Preset as Preset
from hf_memopt.presets import get_preset as get_preset
from hf_memopt.presets import list_presets as list_presets
from hf_memopt.trainer.interrupt import TrainingInterrupted as TrainingInterrupted
from hf_memopt.trainer.interrupt import TrainingTerminated as TrainingTerminated
from hf_memopt.trainer.trainer import MemoryTrainer as MemoryTrainer
from hf_memopt.trainer.trainer import MemoryTrainerMixin as MemoryTrainerMixin

__version__: str
