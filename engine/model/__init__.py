"""The model: its weights and tokenizer from disk, its forward pass and sampling on the device."""
