"""The base of stepscope: numbers as text, files that appear whole, confidence intervals of means, this machine."""
