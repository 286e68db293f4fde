"""How long jobs take, on which GPUs, and when all of them are done."""
