"""What the recipes share: arguments, models with their adapters, checkpoints, progress and the closing report."""
