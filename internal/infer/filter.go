// SPDX-License-Identifier: Apache-2.0

package infer

// Filter is a Kalman filter of a value that is taken to stay as it is, from noisy measurements of it
// (HLB, section IV-B2).
type Filter struct {
	// Value is the estimate, the paper's mu.
	Value float64
	// Error is the variance that the estimate is expected to have, P. The paper does not say how it
	// begins.
	Error float64
}

// Update takes in a measurement whose noise has the variance R, and returns the gain K, 0 to 1: how far
// the estimate has gone towards it.
func (f *Filter) Update(measured, noise float64) (gain float64) {
	if f.Error > 0 {
		gain = f.Error / (f.Error + noise)
	}
	f.Value += gain * (measured - f.Value)
	f.Error *= 1 - gain
	return gain
}
