"""Training on scored rollouts, for every pipeline.

`updates` computes token weights of a selection and trains on it, `losses` builds the configured loss, `measures` and
`token_columns` record metrics, `alarms` and `failures` stop a failing run, and `state` is kept between steps.
"""
