// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// LAMB's arithmetic, on vectors or on single numbers; included within their namespace.

/// The step before learning rate and ratio. Both passes call it, so that it has the same bits in both.
DEEPTIDE_HOST_DEVICE V lamb_update(V p, V m, V v, const LambScalars& s) {
  const D d;
  const V eps = hn::Set(d, s.eps);
  V denominator = s.eps_inside_sqrt ? hn::Sqrt(hn::Add(v, eps)) : hn::Add(hn::Sqrt(v), eps);
  if (s.mean_where_unreached) {
    denominator = hn::IfThenElse(hn::Eq(v, hn::Zero(d)), hn::Add(hn::Abs(m), eps), denominator);
  }
  return hn::MulAdd(hn::Set(d, s.decay), p, hn::Div(m, denominator));
}

/// The first pass: moves the states; returns that step. `g`: the gradient's sum.
DEEPTIDE_HOST_DEVICE V lamb_measured(V p, V g, V& m, V& v, const LambScalars& s) {
  const D d;
  g = hn::Mul(g, hn::Set(d, s.gradient_scale));
  m = lerp(m, g, s.first_weight);
  v = hn::MulAdd(hn::Mul(g, hn::Set(d, s.second_weight)), g, hn::Mul(v, hn::Set(d, s.second_keep)));
  return lamb_update(p, m, v, s);
}

/// The second: the new master.
DEEPTIDE_HOST_DEVICE V lamb_moved(V p, V m, V v, const LambScalars& s) {
  return hn::NegMulAdd(hn::Set(D(), s.step_size), lamb_update(p, m, v, s), p);
}
