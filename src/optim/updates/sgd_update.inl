// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// SGD's arithmetic, on vectors or on single numbers; included within their namespace.

struct SgdUpdate {
  DEEPTIDE_HOST_DEVICE V decayed(V p, V g) const {
    return s.l2_decay != 0.0f ? hn::MulAdd(hn::Set(D(), s.l2_decay), p, g) : g;
  }
  DEEPTIDE_HOST_DEVICE V operator()(V p, V g) const { return hn::NegMulAdd(hn::Set(D(), s.lr), decayed(p, g), p); }
  DEEPTIDE_HOST_DEVICE V operator()(V p, V g, V& momentum) const {
    const D d;
    g = decayed(p, g);
    momentum = hn::MulAdd(hn::Set(d, s.gradient_keep), g, hn::Mul(momentum, hn::Set(d, s.momentum)));
    const V update = s.nesterov ? hn::MulAdd(hn::Set(d, s.momentum), momentum, g) : momentum;
    return hn::NegMulAdd(hn::Set(d, s.lr), update, p);
  }
  SgdScalars s;
};
