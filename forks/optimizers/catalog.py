"""All optimizers of hidden matrices by their names, and the results of the benchmark by theirs."""

import adam
import aurora
import muon
import muown
import normuon
import pmuon
import psgd
import shampoo
import sinksoap
import soap
import soap_muon
import spectral_annealing

# Rules, as train_gpt.py describes them above muon. Each has a record of its name in its module.
OPTIMIZERS = {}
RESULTS = {}  # their settings that are not those of `muon`
MODULES = adam, muon, normuon, muown, pmuon, soap, sinksoap, shampoo, psgd
for module in (*MODULES, soap_muon, aurora, spectral_annealing):
    for name, settings in module.RECORDS.items():
        RESULTS[name] = {"optimizer": name} | settings
        if RESULTS[name]["optimizer"] == name:
            OPTIMIZERS[name] = getattr(module, name)
REFRESHING = "soap", "klsoap", "shampoo", "soap_muon", "aurora_soap", "spectral_annealing"
# Settings that not all optimizers read, and those that do not read them.
UNREAD = {
    "matrix_beta2": ["muon", "muown", "psgd", "aurora"],
    "momentum_damped": ["adamw", "adamh", "soap", "klsoap", "shampoo", "psgd"],
    "norm_control": ["adamw", "muown"],
    "muon_decay": ["muown"],
    "cautious_decay": ["adamw", "muown"],
    "precondition_frequency": OPTIMIZERS.keys() - {*REFRESHING},
}
READ_WITH = {  # --norm_control
    "muon_decay": ("decay", "radius"),
    "cautious_decay": ("decay", "radius"),
    "update_floor": ("floor", "radius"),
    "floor_rows": ("floor", "radius"),
}
