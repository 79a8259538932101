"""The parts of the tiny GLM-5.2's training and evaluation scripts."""
