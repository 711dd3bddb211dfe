"""The samples that a plan is for: a data set's lengths, the longest that fit, frames of videos."""
