"""The loss on made-up numbers: four tokens of one response, the third the junior's. Nothing is loaded or started."""

import torch

import slime_tandem

new = torch.tensor([-1.0, -2.0, -0.5, -1.5], requires_grad=True)  # log-probs of the policy, nats
tokens = slime_tandem.PackedTokens(
    old_log_probs=torch.tensor([-1.1, -2.0, -0.5, -1.4]),
    advantages=torch.full((4,), 0.8),
    weights=torch.tensor([1.0, 1.0, 0.0, 1.0]),  # 0: the junior's token teaches nothing
    opd_weights=torch.tensor([1.0, 0.0, 0.0, 1.0]),  # the teacher has a proven value for two tokens
    teacher_log_probs=torch.tensor([-0.7, 0.0, 0.0, -3.0]),
)
totals = slime_tandem.Denominators(pg=3.0, opd=2.0)
loss, metrics = slime_tandem.tandem_loss(
    new, torch.ones(4), tokens, totals, slime_tandem.ObjectiveConfig(), slime_tandem.OpdConfig()
)
loss.backward()
print(f"loss {metrics['loss']:.4f} = task {metrics['pg_loss']:.4f} + teacher {metrics['opd_loss']:.4f}")
print("gradient per token:", [round(g, 3) for g in new.grad.tolist()])
