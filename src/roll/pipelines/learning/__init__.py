"""The way from scored rollouts to new weights, for every pipeline.

`updates` weighs a selection and trains on it, `losses` builds the loss that the configuration describes, `measures`
and `token_columns` record what happened, `alarms` and `failures` stop a run that goes wrong, and `state` is remembered
between steps.
"""
