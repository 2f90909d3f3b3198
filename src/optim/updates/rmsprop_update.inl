// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// RMSprop's arithmetic, on vectors or on single numbers; included within their namespace.

struct RmspropUpdate {
  DEEPTIDE_HOST_DEVICE V decayed(V p, V g) const {
    return s.l2_decay != 0.0f ? hn::MulAdd(hn::Set(D(), s.l2_decay), p, g) : g;
  }
  DEEPTIDE_HOST_DEVICE void square(V g, V& squares) const {
    const V kept = hn::Mul(squares, hn::Set(D(), s.keep));
    squares = hn::MulAdd(hn::Mul(g, hn::Set(D(), s.weight)), g, kept);
  }
  DEEPTIDE_HOST_DEVICE void average(V g, V& mean) const { mean = lerp(mean, g, s.weight); }
  DEEPTIDE_HOST_DEVICE V divided(V g, V variance) const {
    return hn::Div(g, hn::Add(hn::Sqrt(variance), hn::Set(D(), s.eps)));
  }
  DEEPTIDE_HOST_DEVICE V moved(V p, V step) const { return hn::NegMulAdd(hn::Set(D(), s.lr), step, p); }
  DEEPTIDE_HOST_DEVICE V with_momentum(V p, V step, V& buffer) const {
    buffer = hn::Add(hn::Mul(buffer, hn::Set(D(), s.momentum)), step);
    return moved(p, buffer);
  }

  RmspropScalars s;
};

struct RmspropPlain : RmspropUpdate {
  DEEPTIDE_HOST_DEVICE V operator()(V p, V g, V& squares) const {
    g = decayed(p, g);
    square(g, squares);
    return moved(p, divided(g, squares));
  }
  DEEPTIDE_HOST_DEVICE V operator()(V p, V g, V& squares, V& buffer) const {
    g = decayed(p, g);
    square(g, squares);
    return with_momentum(p, divided(g, squares), buffer);
  }
};

struct RmspropCentered : RmspropUpdate {
  DEEPTIDE_HOST_DEVICE V step(V g, V& squares, V& mean) const {
    square(g, squares);
    average(g, mean);
    return divided(g, hn::NegMulAdd(mean, mean, squares));
  }
  DEEPTIDE_HOST_DEVICE V operator()(V p, V g, V& squares, V& mean) const {
    return moved(p, step(decayed(p, g), squares, mean));
  }
  DEEPTIDE_HOST_DEVICE V operator()(V p, V g, V& squares, V& mean, V& buffer) const {
    return with_momentum(p, step(decayed(p, g), squares, mean), buffer);
  }
};
