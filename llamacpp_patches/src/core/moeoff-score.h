#pragma once

// The learned score of how soon an expert will be used again: what moeoff/policies/score.py describes, for one gate
// after the other. The arrays are the policy's own (moeoff_score), so that a simulation and a running model compute the
// same. Of one thread at a time; takes no memory.

#include "moeoff.h"

namespace moeoff {

// A gate has selected for so many tokens. probs, uses [n_experts]: of each expert the mean probability, and the share
// of tokens that selected it
void score_take(
    moeoff_score & score, int32_t gate, int32_t n_tokens, bool is_decode, const float * probs, const float * uses);
// The same of tokens that are decoded. Without logits the weights of the selected take the probabilities' place
void score_take(moeoff_score & score, const moeoff_gate_event & event);

} // namespace moeoff
