"""Training text: the embedded corpus, files and hub datasets, chat templates, packing, answer-only labels."""
