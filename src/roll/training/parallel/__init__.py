"""Division of one trainer's network over ranks: weights (tensor parallel) and tokens (sequence, context parallel).

    tokens of the row     cp slices ── embed ──► tp slices of these ── norms, residuals (on a slice each)
                                                  │ gather over tp                    ▲ reduce-scatter over tp
                                                  ▼                                   │
                              attention: heads of this tp rank; over cp, heads ◄─► tokens change places
                              MLP: columns of this tp rank
    predictions           each cp rank those of its slice, from its tp rank's vocabulary shard ──► all ranks

Invariant: along tp and cp, all ranks compute the same loss, and every gradient is a share: the sum over the ranks is
the gradient. A value that several ranks compute identically contributes its gradient divided among them.
"""
