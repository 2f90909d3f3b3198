// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Adagrad's arithmetic, on vectors or on single numbers; included within their namespace.

struct AdagradUpdate {
  DEEPTIDE_HOST_DEVICE V operator()(V p, V g, V& sum) const {
    const D d;
    if (s.l2_decay != 0.0f) g = hn::MulAdd(hn::Set(d, s.l2_decay), p, g);
    sum = hn::MulAdd(g, g, sum);
    const V denominator = hn::Add(hn::Sqrt(sum), hn::Set(d, s.eps));
    return hn::Sub(p, hn::Div(hn::Mul(hn::Set(d, s.step_size), g), denominator));
  }
  AdagradScalars s;
};
