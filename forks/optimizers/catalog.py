"""All optimizers of hidden matrices by their names, and the results of the benchmark by theirs."""

import adam
import dynmuon
import muon
import muown
import normuon
import psgd
import shampoo
import soap
import soap_muon
import torch

import train_gpt as t

# Rules, as train_gpt.py describes them above muon.
OPTIMIZERS = {
    "adamw": adam.adamw,
    "adamh": adam.adamh,
    "muon": muon.muon,
    "spectral_descent": muon.spectral_descent,
    "muon_squared": muon.muon_squared,
    "normuon": normuon.normuon,
    "contra_muon": normuon.contra_muon,
    "dynmuon": dynmuon.dynmuon,
    "muown": muown.muown,
    "soap": soap.soap,
    "klsoap": soap.klsoap,
    "shampoo": shampoo.shampoo,
    "shampoo_pinv": shampoo.shampoo_pinv,
    "psgd": psgd.psgd,
    "soap_muon": soap_muon.soap_muon,
}
RESULTS = {}  # settings that are not those of `muon`
for module in (adam, muon, normuon, dynmuon, muown, soap, shampoo, psgd, soap_muon):
    for name, settings in module.RECORDS.items():
        RESULTS[name] = {"optimizer": name} | settings
# Settings that only some optimizers read; momentum_start stands for all of the momentum.
OPTIONAL = "norm_control", "muon_decay", "update_floor", "floor_rows", "matrix_beta2"
OPTIONAL += "frequency", "momentum_damped", "momentum_start"


class Recorder:
    """Stands for an object, and notes which of its attributes are read."""

    def __init__(self, of):
        self.of, self.names = of, set()

    def __getattr__(self, name: str):
        self.names.add(name)
        return getattr(self.of, name)


def unread(hp, moment: type) -> set[str]:
    """Return which of the OPTIONAL settings an optimizer does not read in two steps of training a
    small matrix."""
    params = [torch.nn.Parameter(torch.eye(4))]
    rows, settings = t.Rows(t.Group("", params, None, 0.0, 2), params, 0, 1, 1), Recorder(hp)
    for step in range(2):
        now, rows.grad = Recorder(moment(step, hp)), torch.ones_like(rows.own)
        OPTIMIZERS[hp.optimizer](rows, 0.0, now, settings)
        settings.names |= {f"{name}_start" for name in now.names}
    return set(OPTIONAL) - settings.names
