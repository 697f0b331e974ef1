"""The worker: sends gradients in slices by priority and puts updated slices in their place."""
