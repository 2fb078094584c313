"""What rules need of a trace, in words: where it is missing, what to record."""

from __future__ import annotations

GRADIENTS = 'gradients of parameters in three or more steps: keep "gradients" in record=, and train that long'
GRAPH = "the autograd graph of a loss: call backward() while the trace is attached, on a model that is not compiled"
OPTIMIZER = "an optimizer that steps while the trace is attached; attach(…, optimizer=…) makes it known from the start"
OUTPUTS = 'outputs of modules in three or more steps: keep "outputs" in record=; a compiled model shows its root alone'
UPDATES = 'updates of parameters in three or more steps: keep "updates" and "parameters" in record='
SAMPLES = 'fingerprints of samples: keep "samples" in record=, or call trace.samples(batch)'
SPLITS = (
    'samples of both splits: run validation while the trace is attached, or call trace.samples(batch, "validation")'
)
LOSS = "a loss: call backward() on one number while the trace is attached"
TARGETS = "a cross-entropy over class numbers (torch.nn.functional.cross_entropy) in the loss"
SCALER = "a GradScaler that steps the optimizer while the trace is attached"
TIMES = "five or more training steps with an optimizer"
MASKS = "a mask: an argument named so, or tracehooks.mask(m, name) in the model"
INPUTS = "inputs of the root in six or more steps: call the model itself, not methods of it"
