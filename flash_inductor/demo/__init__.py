"""The demo: a small language model trained with stock ``torch.compile`` and with the plugin, side by side."""
