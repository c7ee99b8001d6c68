"""Parallelism of a trainer: tensor, sequence, context (Ulysses), expert and pipeline parallelism, and FSDP2.

    tokens of the row     cp slices ── embed ──► tp slices of these ── norms, residuals (on a slice each)
                                                  │ gather over tp                    ▲ reduce-scatter over tp
                                                  ▼                                   │
                              attention: heads of this tp rank; over cp, heads ◄─► tokens are exchanged
                              MLP: columns of this tp rank
    predictions           each cp rank those of its slice, from its tp rank's vocabulary shard ──► all ranks

Invariant: along tp and cp, all ranks compute the same loss, and each rank's gradient is a share: the sum of the shares
over the ranks is the gradient. If several ranks compute the same value, its gradient is divided by the number of these
ranks.
"""
