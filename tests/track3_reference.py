"""The benchmark's optimizers in plain float64, from descriptions of the published scripts; no code
is shared. A Weight is one parameter. Singular values take the place of Newton-Schulz iterations,
sums over all past gradients that of running averages, inverses that of solvers."""

import math
from types import SimpleNamespace

import torch
from torch.linalg import inv, svd

PLAIN = ((2.0, -1.5, 0.5),) * 12
EXPRESS = (8.2051, -22.9019, 16.4607), (4.0664, -2.8612, 0.5184), (3.9096, -2.8234, 0.5250)
EXPRESS += (3.2856, -2.4153, 0.4853), (2.2779, -1.6198, 0.3985), (1.8726, -1.2307, 0.3585)
EXPRESS += ((1.8564, -1.2132, 0.3568), *((1.875, -1.25, 0.375),) * 5)


def size(x, least=0.0, p=2) -> float:
    return max(float(torch.linalg.vector_norm(x, p)), least)


def polar(x, coefficients=PLAIN, p=2):
    """Return x with all its singular values iterated, from an l_p norm of 1."""
    u, values, vh = svd(x, full_matrices=False)
    values = values / (size(values) + 1e-7 if p == 2 else size(values, 1e-7, p))
    for a, b, c in coefficients:
        values = a * values + b * values**3 + c * values**5
    return u * values @ vh


def root(factor):
    """Return factor^(-1/4) on the eigenvectors whose eigenvalues are positive."""
    values, vectors = torch.linalg.eigh(factor)
    pairs = zip(values, vectors.T, strict=True)
    return sum((v**-0.25 * x.outer(x) for v, x in pairs if v > 0), torch.zeros_like(factor))


def schatten4(x, least=0.0) -> float:
    return size(svd(x)[1], least, p=4)


def balanced(x, corrections, power, p=2):
    """Return Aurora's polar factor of a tall matrix, or of a wide one's transpose."""
    if x.size(0) < x.size(1):
        return balanced(x.T, corrections, power, p).T
    scale = torch.stack([1 / row.norm().clamp(min=1e-7) for row in x])
    for _ in range(corrections):
        rows = polar(scale.diag() @ x, p=p).square().sum(1).clamp(min=1e-14)
        scale = scale * (x.size(1) / x.size(0) / rows) ** power
    return polar(scale.diag() @ x, p=p)


def extrapolation(past, damping=0.875, most=0.001):
    """Return what is added to the last of four vectors."""
    moves = torch.stack([b - a for a, b in zip(past, past[1:], strict=False)])
    gram = moves @ moves.T
    gram = gram + (1e-6 * gram.trace() / 3 + 1e-10) * torch.eye(3)
    shares = inv(gram).sum(1)
    shares = shares / shares.sum()
    added = damping * (past[0] - sum(c * x for c, x in zip(shares, past[1:], strict=True)))
    return added * min(1.0, most * size(past[3]) / size(added))


def orthonormal(x):
    """Return the Q of a QR decomposition, up to signs, by Gram and Schmidt."""
    q = x[:, :0]
    for column in x.T:
        for _ in range(2):
            column = column - q @ (q.T @ column)
        q = torch.cat([q, column[:, None] / size(column)], 1)
    return q


class Weight:
    """A parameter w; a matrix is (outputs, inputs). Its gradient is g at step s, from 0 on."""

    def __init__(self, w):
        self.w = self.initial = self.start = self.before = w
        self.past, self.moves, self.q, self.roots = {}, 0.0, [], []
        self.second = torch.zeros_like(w)
        self.stretch = max(1.0, w.size(0) / w[0].numel()) ** 0.5

    def average(self, key: str, value, beta: float):
        """Return the running average: each value so far times 1 - its beta and all later betas."""
        total, later = 0.0, 1.0
        self.past.setdefault(key, []).append((value, beta))
        for value, beta in reversed(self.past[key]):
            total, later = total + later * (1 - beta) * value, later * beta
        return total

    # Norm controls return the weights after a step along -u.

    def decay(self, u, lr, share):
        return self.w - lr * (u + share * self.w)

    def hyperball(self, u, lr):
        moved = self.w - lr * size(self.w) * u / size(u, 1e-10)
        return moved * size(self.w) / size(moved, 1e-10)

    def floor(self, u, lr):
        return self.w - lr * u * max(1.0, 0.35 * size(self.w, 1e-8) / size(u, 1e-8))

    def radius(self, u, lr, cautious=0.0, by_rows=False):
        w, norm = self.w, size(self.w, 1e-8)
        radial = (u * w).sum() / max((w * w).sum(), 1e-12) * w
        u = u - radial + (0.5 if (u * w).sum() < 0 else 1.0) * radial
        parts = zip(u, w, strict=True) if by_rows else [(u, w)]
        factors = [max(1.0, 0.3825 * size(y, 1e-8) / size(x, 1e-8)) for x, y in parts]
        u = u * torch.tensor(factors)[:, None]
        moved = (w - lr * u) / size(w - lr * u, 1e-8) * max(norm - lr * (u * w).sum() / norm, 1e-8)
        return torch.where(u * w > 0, moved - lr * cautious * moved, moved)

    # Updates

    def adam(self, betas, eps, steps=None, g=None):
        """The bias is corrected as after so many steps, or else after s + 1."""
        g, t = self.g if g is None else g, steps or self.s + 1
        first, second = (self.average(f"adam{i}", g**i, betas[i - 1]) for i in (1, 2))
        return first / (1 - betas[0] ** t) / ((second / (1 - betas[1] ** t)).sqrt() + eps)

    def nesterov(self, g, mu=0.95):
        return (1 - mu) * g + mu * self.average("momentum", g, mu)

    def muon(self, mu=0.95, squared=False):
        momentum = self.nesterov(self.g, mu)
        if squared:
            momentum = momentum / (self.average("squares", self.g**2, 0.95).sqrt() + 1e-10)
        return polar(momentum) * self.stretch

    def normuon(self, x=None, least=1e-10):
        """Return the update x, Muon's if there is none, with equal lines."""
        x = self.muon() if x is None else x
        lines = x if x.size(0) >= x.size(1) else x.T
        second = self.average("lines", torch.stack([v @ v / len(v) for v in lines]), 0.95)
        new = torch.stack([v / max(b, least) ** 0.5 for v, b in zip(lines, second, strict=True)])
        return (new if x.size(0) >= x.size(1) else new.T) * size(x) / size(new, 1e-10)

    def contra_muon(self, aurora=False):
        """Five steps of power iteration from ones multiply right singular vectors by values^10."""
        momentum = self.nesterov(self.g)
        _, values, vh = svd(momentum, full_matrices=False)
        seen = (values / max(values[0], 1e-300)) ** 10 * vh.sum(1)
        is_square = self.w.size(0) == self.w.size(1)
        whole = balanced(momentum, 1, 0.5) if aurora and not is_square else polar(momentum)
        update = whole - 0.2 * momentum / max(size(values * seen) / size(seen, 1e-300), 1e-10)
        update = update * size(whole) / size(update, 1e-10) * self.stretch
        return update if aurora else self.normuon(update)

    def pmuon(self):
        """`starts` are the random matrices of the first bases."""
        u, powers = self.nesterov(self.g), []
        self.q = self.q or [orthonormal(x) for x in self.starts]
        for i, x in enumerate((u, u.T)):
            total = self.average(f"sum{i}", x @ x.T, 0.95) / (1 - 0.95)
            seen = x @ x.T + 0.95 * total + 1e-6 * torch.eye(len(x))
            q = self.q[i] = orthonormal(seen @ self.q[i])
            values = torch.stack([(v @ seen @ v).clamp(min=1e-6) for v in q.T]) ** -0.3
            powers.append(q @ values.diag() @ q.T * len(x) ** 0.5 / (size(values) + 1e-6))
        return polar(powers[0] @ u @ powers[1]) * self.stretch

    def sinksoap(self):
        u, (m, n) = self.nesterov(self.g), self.g.shape
        grams = self.g @ self.g.T, self.g.T @ self.g
        left, right = (svd(self.average(f"factor{i}", x, 0.95))[0] for i, x in enumerate(grams))
        inner = left.T @ u @ right
        energy, columns = inner**2 + 1e-8, torch.ones(n)
        for _ in range(10):
            rows = 1 / m / (energy @ columns + 1e-8)
            columns = 1 / n / (energy.T @ rows + 1e-8)
        update = left @ (rows.sqrt().diag() @ inner @ columns.sqrt().diag()) @ right.T
        update = update * m**0.5 / size(update, 1e-8)
        return update if m == n else self.normuon(update, 1e-20)

    def muown(self, lr):
        """Return the weights after a step."""
        if not self.roots:
            found = [size(row) if size(row) > 1e-12 else 0.33**0.5 for row in self.w]
            self.roots = [torch.tensor(found)[:, None]] * 2
        (m, n), (first, length) = self.w.shape, self.roots
        last = 2.496 * (3.33333333333 if m < n else 1)
        norm = first + min(max(self.s - 1, 0) / 3164, 1) ** 1.2 * (last - first)
        h = torch.stack([(x @ y)[None] for x, y in zip(self.g, self.w / length, strict=True)])
        momentum = self.nesterov(length / norm * (self.g - self.w / length * h)) / (1 - 0.95)
        turn = lr * 0.2 * max(m, n) ** 0.5 * polar(momentum, EXPRESS)
        rows = [row / size(row, 1e-12) for row in self.w / length * norm - turn]
        self.roots = [first, length - lr * self.adam((0.9, 0.95), 1e-8, g=h)]
        return self.roots[1] * torch.stack(rows)

    def shampoo(self):
        grafted, t = self.adam((0.9, 0.9), 1e-15), self.s + 1
        grams = self.g @ self.g.T, self.g.T @ self.g
        left, right = (root(self.average(f"factor{i}", x, 0.9)) for i, x in enumerate(grams))
        update = left @ self.average("first", self.g, 0.9) @ right * (1 - 0.9**t) ** -0.5
        return update * size(grafted) / (size(update) + 1e-16)

    def psgd(self):
        """`probes[s]` are the step's random numbers, two for each weight."""
        g, (probe, noise) = self.g, self.probes[self.s]
        if not self.q:
            self.q = [max((g**4).mean(), 1e-24) ** (-1 / 32) * torch.eye(d) for d in g.shape]
        momentum = self.average("momentum", g, 0.95) / (1 - 0.95 ** (self.s + 1))
        ratio = (self.q[1].abs().max() / self.q[0].abs().max()) ** 0.5
        left, right = self.q[0] * ratio, self.q[1] / ratio
        a = left @ (momentum + 2.0**-23 * momentum.abs() * noise) @ right.T
        b = inv(left).T @ probe @ inv(right)
        for i, (factor, x, y) in enumerate(((left, a, b), (right, a.T, b.T))):
            total, rest = x @ x.T + y @ y.T, x @ x.T - y @ y.T
            column = (total @ total)[:, (total @ total).diagonal().argmax()]
            self.q[i] = factor - rest.triu() * size(column) / size(total @ column) @ factor
        return self.q[0].T @ self.q[0] @ momentum @ self.q[1].T @ self.q[1]

    def soap(self, kl=False):
        """KL-SOAP's first step moves nothing. Its momentum is kept outside of the bases here."""
        g, white, new = self.g, [self.g, self.g.T], not self.q
        self.q = left, right = self.q or [svd(g)[0], svd(g)[2].T]
        if kl and new:
            self.roots = [torch.full((d,), 0.1) ** -0.5 for d in g.shape]
            self.past = {f"factor{i}": [(x @ x.T / x.size(1), 0)] for i, x in enumerate(white)}
            return torch.zeros_like(g)
        second = self.average("second", (left.T @ g @ right) ** 2, 0.9)
        momentum = left.T @ self.average("momentum", g, 0.95) @ right
        if kl:
            white = g @ right * self.roots[1], g.T @ left * self.roots[0]
            white = [x / x.size(1) ** 0.5 for x in white]
            seen = [((q.T @ x) ** 2).sum(1) for q, x in zip(self.q, white, strict=True)]
            values = [0.9 * r**-2 + 0.1 * v for r, v in zip(self.roots, seen, strict=True)]
            self.roots = [(v**-0.5).clamp(max=4000) for v in values]
        factors = [self.average(f"factor{i}", x @ x.T, 0.9) for i, x in enumerate(white)]
        self.q = [orthonormal(x @ q) for x, q in zip(factors, self.q, strict=True)]
        return left @ (momentum / (second.sqrt() + 1e-8)) @ right.T

    def trust(self, p, u) -> float:
        """Return how much of the direction p attn_proj takes."""
        pairs = (p, u), (p, self.g), (u, self.g)
        both, new, old = ((a * b).sum() / max(size(a) * size(b), 1e-8) for a, b in pairs)
        share = ((both - 0.2) / 0.8).clamp(0, 1) * (new / max(old, 1e-8)).clamp(0, 1)
        least = 0.45 if self.s < 1375 else 0.45 * max(1625 - self.s, 0) / 250
        return min(max(float(share), least), 0.85 if self.s < 1625 else 1.0)

    def soap_muon(self, gated=False, result=None):
        """With a result: its two momenta, and its annealing."""
        g, mu = self.g, momentum_of_46(self.s)
        u = self.nesterov(g, mu)
        if result and self.s >= 1000:
            begun, both = "momentum 0.98" in self.past, []
            for beta in (0.85, 0.98):
                of_before = self.average("momentum", 0 * g, 1.0)
                value = (g, beta) if begun else (of_before, 0.0)
                both.append(self.average(f"momentum {beta}", *value))
            u = (1 - mu) * g + mu * (0.4385 * both[0] + 0.5615 * both[1])
        p, (left, right) = self.soap_direction(u)
        if gated and not (result and self.s >= 1000):
            p = u + (p - u) * self.trust(p, u)
            p = p * schatten4(u, 1e-8) / schatten4(p, 1e-8)
        update = polar(p, p=4) * self.stretch
        if result and (ratio := max(result.hidden(self.s), 0.3)) < 1:
            update = self.annealed(update, left, right, ratio)
        self.learn_bases()
        return update

    def soap_direction(self, u, least=0.0, kept=0.0):
        """Return the direction, and the bases. `second` is sorted with them by learn_bases."""
        new, (left, right) = not self.q, self.q or [svd(self.g)[0], svd(self.g)[2].T]
        if new:
            return u, (left, right)
        self.second = 0.9 * self.second + 0.1 * (left.T @ u @ right) ** 2
        below = self.second.clamp(min=1e-16).sqrt()
        if least:
            below = below.clamp(min=max(least * float((below**2).mean()) ** 0.5, 1e-8))
        p = (1 - kept) * left @ (left.T @ u @ right / below) @ right.T + kept * u
        return p * schatten4(u, 1e-8) / schatten4(p, 1e-8), (left, right)

    def learn_bases(self, every=1):
        g = self.g
        factors = [self.average(f"factor{i}", x @ x.T, 0.9) for i, x in enumerate((g, g.T))]
        if not self.q:
            self.q = [svd(g)[0], svd(g)[2].T]
        elif self.s % every == 0:
            cases = list(zip(factors, self.q, strict=True))
            i, j = ((q.T @ x @ q).diagonal().argsort(descending=True) for x, q in cases)
            self.second, q = self.second[i][:, j], (self.q[0][:, i], self.q[1][:, j])
            self.q = [orthonormal(x @ basis) for x, basis in zip(factors, q, strict=True)]

    def annealed(self, update, left, right, ratio):
        values = []
        for i, (x, q) in enumerate(((self.g, left), (self.g.T, right))):
            beta = 0.99 if f"covariance{i}" in self.past else 0.0
            seen = self.average(f"covariance{i}", x @ x.T, beta)
            values.append(torch.stack([(v @ seen @ v).clamp(min=1e-30) for v in q.T]))
        logs = values[0].outer(values[1]).log()
        far = logs - logs.mean()
        far = far / max((far.square().sum() / (far.numel() - 1)).sqrt(), 1e-6)
        entries = (left.T @ update @ right) * torch.exp(far.clamp(-2, 2) / 4 * math.log(ratio))
        scaled = left @ entries @ right.T
        return scaled * size(update) / size(scaled, 1e-30)

    def aurora_soap(self, kind):
        """SOAP in v, fc and mlp_proj, Aurora in mlp_proj, Contra-Muon by Schatten norms."""
        momentum = self.nesterov(self.g, momentum_of_46(self.s, end=3020))
        (m, n), has_bases = self.w.shape, kind == "v" or self.w.size(0) != self.w.size(1)
        if has_bases:
            momentum = self.soap_direction(momentum, *((0.55, 0.05) if kind == "v" else ()))[0]
        whole = balanced(momentum, 2, 0.25, p=4) if m < n else polar(momentum, p=4)
        share = 0.2 * max(1 - self.s / 2500, 0) / schatten4(momentum, 1e-10)
        update = whole - share * momentum
        if has_bases:
            self.learn_bases(every=10)
        return update * schatten4(whole) / schatten4(update, 1e-10) * self.stretch

    def head_adam(self, lr):
        """Adam in eigenvectors. The first moment stays outside of them here."""
        t, g, begun = self.s + 1 - self.first_step, self.g, self.s >= 1000
        if begun:
            first = "covariance" not in self.past
            seen = self.average("covariance", g.T @ g, 0.0 if first else 0.95)
            if first or (self.s - 1000) % 8 == 0:
                before, self.q = self.q, [torch.linalg.eigh(seen)[1]]
                turn = before[0].T @ self.q[0] if before else self.q[0]
                self.second = self.second @ turn**2
        basis = self.q[0] if self.q else torch.eye(g.size(1))
        self.second = 0.99 * self.second + 0.01 * (g @ basis) ** 2
        mean = self.average("first", g, 0.8) / (1 - 0.8**t) @ basis
        return self.w - lr * mean / ((self.second / (1 - 0.99**t)).sqrt() + 1e-10) @ basis.T

    def gradient_point(self, result, s):
        """Return the weights at which the gradient of a step is taken."""
        ahead = self.w
        if result.ahead[1] <= s < result.ahead[2]:
            share = result.rate("embed", s - 1) / result.rate("embed", 0)
            ahead = self.w + result.ahead[0] * share * self.moves
        far = 0.45 * min(max(s - 2100, 0) / 100, 1)
        return ahead + far * (ahead - getattr(self, "tail", ahead))

    def step(self, name: str, result, s: int, g) -> None:
        """Make a result's step. Adam of all but matrices counts from the first step made."""
        self.s, self.g = s, g
        if result.ahead and result.ahead[1] <= s < result.ahead[2]:  # EMA-Nesterov
            share = result.rate("embed", s - 1) / result.rate("embed", 0)
            self.w = self.w + result.ahead[0] * share * self.moves
        kind = "vector" if g.ndim == 1 else name.split(".")[0]
        lr, beta2 = result.rate(kind, s), 0.99 if result.late else result.beta2
        if result.opened and kind == "lm_head":
            self.w = self.head_adam(lr)
        elif result.update == "muown" and kind == "blocks":
            self.w = self.muown(lr)
        elif kind == "blocks":
            more = {"gated": "attn_proj" in name} if result.late else {}
            more |= {"result": result} if result.opened else {}
            more = {"kind": name.split(".")[-2]} if result.update == "aurora_soap" else more
            u = getattr(self, result.update)(**result.how, **more)
            self.w = getattr(self, result.control)(u, lr, **result.norm)
        elif kind == "vector" and result.late:
            beta2 = beta2 if "gains" in name else 0.9965 if "attn_proj" in name else 0.997
            self.w = self.w - lr * self.adam((0.8, beta2), 1e-10, steps=math.inf)
        else:
            u = self.adam((0.8, beta2), 1e-10, steps=s + 1 - self.first_step)
            self.w = self.decay(u, lr, result.adam_decay)
        self.moves, self.before = self.average("moves", self.w - self.before, 0.99), self.w
        if result.outer and (s + 1) % result.outer == 0:  # MuLoCo
            way = self.start - self.w
            buffer = self.average("ways", way, 0.5) / 0.5 * 0.7
            self.w = self.start = self.start - 0.5 * buffer - 0.7 * way
        if result.tail and s + 1 >= result.tail[0]:
            tail = getattr(self, "tail", self.w)
            self.tail = tail + (self.w - tail) / result.tail[1]
            if s + 1 == result.steps:
                share = 0.0 if kind == "embed" else 0.6
                if result.opened and kind != "embed":
                    first = 0.8 if "blocks.0" in name else 0.55
                    share = {"vector": 1.0, "lm_head": 0.5}.get(kind, first)
                self.w = (1 - share) * self.w + share * self.tail


def momentum_of_46(s: int, end: int = 2900) -> float:
    """In results 44 to 46 it falls for 200 steps; in 30 and 34 for 100, until 3020."""
    length = 200 if end == 2900 else 100
    return 0.85 + 0.1 * s / 300 if s < 300 else 0.95 - 0.1 * max(s - end + length, 0) / length


def fall(length: int, share=0.7, power=1.0):
    """Return the schedule that is 1, and falls to 0 in the last share of its length."""
    return lambda s: min(1.0, (1 - s / length) / share) ** power


def result(steps, lr, update, control, hidden, others=None, rates=(0.3, 1 / 320, 0.01), **more):
    """Return settings, in absolute steps. `control` is the name of a norm control, or a weight
    decay; `hidden` and `others` are schedules; `how` and `norm` are arguments of both methods."""
    lrs = dict(zip(("blocks", "embed", "lm_head", "vector"), (lr, *rates), strict=True))

    def rate(kind: str, s: int) -> float:
        return lrs[kind] * (hidden if kind == "blocks" else others or hidden)(s)

    usual = {"how": {}, "norm": {}, "adam_decay": 0.0, "late": False, "opened": False}
    usual |= {
        "hidden": hidden,
        "beta2": 0.95,
        "extrapolates": False,
        "ahead": (),
        "outer": 0,
        "tail": (),
        "steps": steps,
        "update": update,
        "rate": rate,
    }
    if isinstance(control, float):
        control, more = "decay", more | {"norm": {"share": control}}
    return SimpleNamespace(**(usual | {"control": control} | more))


BALL, AUX = "hyperball", {"adam_decay": 0.001}
TUNED = (0.7, 0.004, 0.015), (0.91, 0.0064, 0.0195), (0.6, 0.009375, 0.03)
ADAMW, ADAMH = ({"how": {"betas": (0.9, 0.95), "eps": eps}} for eps in (1e-10, 1e-8))
LATE = {"late": True, "ahead": (0.3, 300, 1950)}
BY_ROWS = {"norm": {"cautious": 0.025, "by_rows": True}, "tail": (2400, 150)}
RATES = {
    "adamw": lambda s: min(1, (s + 1) / 250) * fall(5625)(s),
    "adamh": lambda s: s / 250 if s < 250 else 1 - s / 4875,
    "psgd": lambda s: 1 if s < 1700 else 1 - 0.9 * (s - 1700) / 1700,
    "late": lambda s: min(0.0375, 3.3169534699576625e-06 * (2900 - s) ** 1.2) / 0.0375,
    "others": lambda s: min(0.3, 4.976805410800738e-05 * (2900 - s) ** 1.2) / 0.3,
}
SOAP_MUON = 0.0375, "soap_muon", "radius", RATES["late"], RATES["others"]
AURORA_SOAP = 0.0375, "aurora_soap", "radius"
AURORA_SOAP += tuple(lambda s, k=k: min(1, (3050 - s) / k) ** 1.2 for k in (2386.4, 1413))
POWERCOOL = (
    lambda s: 0.017 + 0.983 * (1 - s / 3125) ** 1.5,
    lambda s: 0.04 + 0.96 * min(1, (1 - s / 3125) / 0.4) ** 1.5,
)
OPENED = 0.0375, "soap_muon", "radius"
OPENED += tuple(lambda s, f=f: f(s + 60 * (s >= 1400)) for f in (RATES["late"], RATES["others"]))
LATE_2540 = {"late": True, "opened": True, "ahead": (0.3, 300, 1890)}
BY_ROWS_2540 = {"norm": BY_ROWS["norm"], "tail": (2040, 100)}
RESULTS = {
    "adamw": result(5625, 0.0015, "adam", 0.1, RATES["adamw"], **ADAMW),
    "adamh": result(4875, 0.018, "adam", BALL, RATES["adamh"], fall(4875, 0.4), **ADAMH),
    "muon": result(3250, 0.025, "muon", 0.05, fall(3250), None, TUNED[0], **AUX),
    "muon_untuned_adam": result(3325, 0.035, "muon", 0.025, fall(3350)),
    "muonh": result(3250, 0.018, "muon", BALL, fall(3250, 1), fall(3250, 0.85), TUNED[1], **AUX),
    "spectral_descent": result(8225, 0.03, "muon", 0.015, fall(8500), how={"mu": 0.0}),
    "muon_squared": result(3325, 0.1, "muon", 0.0125, fall(3325), how={"squared": True}),
    "ema_nesterov": result(3125, 0.035, "muon", 0.025, fall(3150), ahead=(0.6, 500, 2400)),
    "normuon": result(3250, 0.035, "normuon", 0.025, fall(3300)),
    "normuon_floor": result(3250, 0.0375, "normuon", "floor", fall(3250)),
    "contra_muon": result(3225, 0.0375, "contra_muon", "floor", fall(3225)),
    "muloco": result(3210, 0.018, "normuon", BALL, fall(3210, 1), fall(3210, 0.4), outer=30),
    "muown": result(3075, 0.00325, "muown", "", fall(3165, 0.7, 0.9), None, TUNED[2]),
    "klsoap": result(3125, 0.018, "soap", BALL, fall(3125, 1), fall(3125, 0.4), how={"kl": True}),
    "soap": result(3125, 0.018, "soap", BALL, fall(3200, 1, 1.25), fall(3125, 0.4)),
    "shampoo": result(3375, 0.01, "shampoo", 0.1, fall(3375)),
    "pmuon": result(3225, 0.035, "pmuon", 0.025, fall(3250)),
    "sinksoap": result(3090, 0.04, "sinksoap", 0.025, fall(3125)),
    "klsoap_powercool": result(3040, 0.018, "soap", BALL, *POWERCOOL, how={"kl": True}),
    "aurora": result(3175, 0.0375, "contra_muon", "floor", fall(3200), how={"aurora": True}),
    "aurora_soap": result(2930, *AURORA_SOAP, beta2=0.99),
    "rre": result(2925, *AURORA_SOAP, beta2=0.99, extrapolates=True),
    "psgd": result(3375, 0.025, "psgd", BALL, fall(3400, 1), RATES["psgd"]),
    "soap_muon": result(2750, *SOAP_MUON, **LATE),
    "tail_ema": result(2720, *SOAP_MUON, **LATE, tail=(2000, 150)),
    "row_floor": result(2690, *SOAP_MUON, **LATE, **BY_ROWS),
    "spectral_annealing": result(2540, *OPENED, **LATE_2540, **BY_ROWS_2540),
}
