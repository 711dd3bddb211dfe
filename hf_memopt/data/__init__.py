"""Texts to train on: the embedded corpus, files and hub data sets, packing, answer-only labels."""
