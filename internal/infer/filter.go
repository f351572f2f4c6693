// SPDX-License-Identifier: Apache-2.0

package infer

// Filter is a Kalman filter. It estimates a value that is assumed to be constant from noisy
// measurements of it (HLB, section IV-B2).
type Filter struct {
	// Value is the estimate, the paper's mu.
	Value float64
	// Error is P, the expected variance of the estimate. The paper does not give its initial
	// value.
	Error float64
}

// Update adds a measurement whose noise has the variance R. It returns the gain K, 0 to 1: how far
// the estimate moved towards the measurement.
func (f *Filter) Update(measured, noise float64) (gain float64) {
	if f.Error > 0 {
		gain = f.Error / (f.Error + noise)
	}
	f.Value += gain * (measured - f.Value)
	f.Error *= 1 - gain
	return gain
}
