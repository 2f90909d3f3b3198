// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Puts a node before each product's, which runs it for the activation's gradient and keeps it for the weight's.
#include "engine/pipeline/weights_aside.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace deeptide::engine {
namespace {

using torch::autograd::AccumulateGrad;
using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Node;
using torch::autograd::variable_list;
using NodePtr = decltype(Edge::function);

constexpr std::array<std::string_view, 6> kProducts = {"AddmmBackward0",   "MmBackward0",     "BmmBackward0",
                                                       "BaddbmmBackward0", "LinearBackward0", "ConvolutionBackward0"};
// Between a product and its weight; they keep nothing, so they may run in either backward, and in both.
constexpr std::array<std::string_view, 3> kPassing = {"TBackward0", "TransposeBackward0", "ToCopyBackward0"};

template <typename Names>
bool is_one_of(const Names& names, const Node& node) {
  return std::ranges::find(names, node.name()) != names.end();
}

/// Autograd runs hooks at the node that it knows.
bool has_hooks(Node& node) {
  return !node.pre_hooks().empty() || !node.tensor_pre_hooks().empty() || !node.post_hooks().empty() ||
         !node.retains_grad_hooks().empty();
}

template <typename Pointer = NodePtr>
Pointer held(Node* node) {
  if constexpr (requires { Pointer::unsafe_steal_from_new(node); }) {
    return Pointer::unsafe_steal_from_new(node);
  } else {  // before torch 2.13
    return Pointer(node, [](auto* each) { deleteNode(each); });
  }
}

thread_local std::shared_ptr<WeightsAside> recording_of_thread;

}  // namespace

struct WeightsAside::Left {
  struct Product {
    NodePtr node;
    at::Tensor gradient;  // of its output
  };
  std::mutex mutex;  // each device has a thread of autograd
  std::vector<Product> products;
};

/// Stands in a product's place.
class WeightsAside::Parted : public Node {
 public:
  Parted(NodePtr product, edge_list inputs, edge_list weights, std::shared_ptr<Left> left)
      : Node(product->sequence_nr(), edge_list(inputs)),
        product_(std::move(product)),
        weights_(std::move(weights)),
        left_(std::move(left)) {
    add_input_metadata(Node::undefined_input());
    std::destroy_at(&mutable_input_metadata(0));  // it cannot be assigned
    std::construct_at(&mutable_input_metadata(0), product_->input_metadata(0));
    product_->next_edges() = std::move(inputs);
  }

  variable_list apply(variable_list&& gradients) override {
    if (!gradients.front().defined()) return variable_list(num_outputs());
    const at::Tensor gradient = gradients.front();
    variable_list of_inputs = (*product_)(std::move(gradients));
    product_->next_edges() = weights_;
    const std::lock_guard lock(left_->mutex);
    left_->products.push_back({std::move(product_), gradient});
    return of_inputs;
  }

  std::string name() const override { return "deeptide::Parted"; }

 private:
  NodePtr product_;
  edge_list weights_;
  std::shared_ptr<Left> left_;
};

/// Goes from outputs to what they were computed from, and parts products on the way.
class WeightsAside::Walk {
 public:
  explicit Walk(const WeightsAside& aside) : aside_(aside) {}

  void run(const Activations& outputs) {
    for (const at::Tensor& output : outputs) {
      if (!output.requires_grad() || output.is_leaf()) continue;
      const Edge before = torch::autograd::impl::gradient_edge(output);
      Edge edge = before;
      visit(edge);
      if (edge != before) torch::autograd::impl::set_gradient_edge(output, edge);
    }
    while (!open_.empty()) {
      const NodePtr node = std::move(open_.back());
      open_.pop_back();
      for (Edge& edge : node->next_edges()) visit(edge);
    }
  }

 private:
  void visit(Edge& edge) {
    if (!edge.is_valid()) return;
    const auto [found, is_new] = in_place_of_.try_emplace(edge.function.get());
    if (is_new) {
      found->second = parted(edge.function);
      open_.push_back(found->second);
    }
    edge.function = found->second;
  }

  /// The node itself unless it is a product of an activation with a weight.
  NodePtr parted(const NodePtr& node) const {
    if (!is_one_of(kProducts, *node) || has_hooks(*node)) return node;
    edge_list inputs = node->next_edges(), weights(inputs.size());
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (leads_to_weight(inputs[i])) std::swap(inputs[i], weights[i]);
    }
    const auto any = [](const edge_list& edges) { return std::ranges::any_of(edges, &Edge::is_valid); };
    if (!any(inputs) || !any(weights)) return node;
    return held(new Parted(node, std::move(inputs), std::move(weights), aside_.left_));
  }

  bool leads_to_weight(const Edge& edge) const {
    for (Node* node = edge.function.get(); node != nullptr; node = node->next_edge(0).function.get()) {
      if (const auto* leaf = dynamic_cast<const AccumulateGrad*>(node)) {
        return aside_.weights_.contains(leaf->variable.unsafeGetTensorImpl());
      }
      if (!is_one_of(kPassing, *node)) return false;
    }
    return false;
  }

  const WeightsAside& aside_;
  std::unordered_map<const Node*, NodePtr> in_place_of_;
  std::vector<NodePtr> open_;
};

WeightsAside::WeightsAside() : left_(std::make_shared<Left>()) {}
WeightsAside::~WeightsAside() = default;

void WeightsAside::set_weights(const Activations& weights) {
  weights_.clear();
  for (const at::Tensor& weight : weights) weights_.insert(weight.unsafeGetTensorImpl());
}

void WeightsAside::part(const Activations& outputs) { Walk(*this).run(outputs); }

std::pair<Activations, Activations> WeightsAside::take() {
  std::pair<Activations, Activations> taken;
  for (Left::Product& product : std::exchange(left_->products, {})) {
    const at::Tensor output = product.gradient.detach();  // a tensor of its shape and device
    torch::autograd::impl::set_gradient_edge(output, {std::move(product.node), 0});
    taken.first.push_back(output);
    taken.second.push_back(std::move(product.gradient));
  }
  return taken;
}

WeightsAside::Recording::Recording(std::shared_ptr<WeightsAside> aside)
    : before_(std::exchange(recording_of_thread, std::move(aside))) {}
WeightsAside::Recording::~Recording() { recording_of_thread = std::move(before_); }

const std::shared_ptr<WeightsAside>& WeightsAside::recording() { return recording_of_thread; }

}  // namespace deeptide::engine
