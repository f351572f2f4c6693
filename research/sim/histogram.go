// SPDX-License-Identifier: Apache-2.0

package sim

import "math"

// Histogram counts positive values in buckets of constant relative width: each power of two has
// 128 buckets. So a quantile is within 0.4% of the exact one. The memory does not grow with the
// number of values, but with the ratio of the largest value to the smallest. Times from 1 µs to
// 4,000,000 s have buckets. Other values count as the nearest of these.
type Histogram struct {
	counts     []uint64
	first      int // the bucket of counts[0]
	count      uint64
	sum        float64
	sumSquares float64
	min, max   float64
}

const (
	histogramBits    = 7   // bits of the mantissa
	histogramLowest  = -20 // smallest exponent of two
	histogramHighest = 22
	histogramBuckets = (histogramHighest - histogramLowest) << histogramBits
	histogramShift   = 52 - histogramBits
	histogramOffset  = (1023 + histogramLowest) << histogramBits
)

// Add counts one value.
func (h *Histogram) Add(x float64) {
	// The exponent and the first bits of the mantissa are the number of the bucket.
	bucket := int(math.Float64bits(x)>>histogramShift) - histogramOffset
	bucket = min(max(bucket, 0), histogramBuckets-1)
	if bucket < h.first || bucket >= h.first+len(h.counts) {
		h.cover(bucket, bucket+1)
	}
	h.counts[bucket-h.first]++
	if h.count == 0 || x < h.min {
		h.min = x
	}
	h.max = max(h.max, x)
	h.count++
	h.sum += x
	h.sumSquares += x * x
}

// cover adds buckets, so that each bucket b with from <= b < to exists. It adds all buckets of a
// power of two at once, and keeps those that exist already.
func (h *Histogram) cover(from, to int) {
	if len(h.counts) > 0 {
		from, to = min(from, h.first), max(to, h.first+len(h.counts))
	}
	const octave = 1 << histogramBits
	from, to = from/octave*octave, (to+octave-1)/octave*octave
	counts := make([]uint64, to-from)
	copy(counts[max(h.first-from, 0):], h.counts) // without counts, first is 0
	h.counts, h.first = counts, from
}

// Merge adds all values of another histogram.
func (h *Histogram) Merge(other *Histogram) {
	if other.count == 0 {
		return
	}
	if h.count == 0 || other.min < h.min {
		h.min = other.min
	}
	h.max = max(h.max, other.max)
	h.count += other.count
	h.sum += other.sum
	h.sumSquares += other.sumSquares
	h.cover(other.first, other.first+len(other.counts))
	for i, n := range other.counts {
		h.counts[other.first+i-h.first] += n
	}
}

// Count returns the number of values.
func (h *Histogram) Count() uint64 { return h.count }

// Mean returns the exact mean. Without values, Mean and the methods below return NaN.
func (h *Histogram) Mean() float64 { return h.sum / float64(h.count) }

// Deviation returns the standard deviation.
func (h *Histogram) Deviation() float64 {
	mean := h.Mean()
	return math.Sqrt(max(h.sumSquares/float64(h.count)-mean*mean, 0))
}

// Min returns the smallest value. Min and Max are exact.
func (h *Histogram) Min() float64 { return h.orNaN(h.min) }

// Max is the largest value.
func (h *Histogram) Max() float64 { return h.orNaN(h.max) }

func (h *Histogram) orNaN(x float64) float64 {
	if h.count == 0 {
		return math.NaN()
	}
	return x
}

// bounds returns the bounds of the bucket of counts[i].
func (h *Histogram) bounds(i int) (low, high float64) {
	bucket := uint64(h.first + i + histogramOffset)
	return math.Float64frombits(bucket << histogramShift), math.Float64frombits((bucket + 1) << histogramShift)
}

// Quantile returns the value that a share q of all values do not exceed, within 0.4%. q is 0 to 1.
func (h *Histogram) Quantile(q float64) float64 {
	if h.count == 0 {
		return math.NaN()
	}
	rank := max(uint64(math.Ceil(q*float64(h.count))), 1)
	seen := uint64(0)
	for i, n := range h.counts {
		if seen += n; seen >= rank {
			low, high := h.bounds(i)
			return min(max((low+high)/2, h.min), h.max)
		}
	}
	return h.max
}

// Below returns the share of values up to x, 0 to 1. It assumes that the values in the
// bucket of x are evenly distributed.
func (h *Histogram) Below(x float64) float64 {
	if h.count == 0 {
		return math.NaN()
	}
	seen := 0.0
	for i, n := range h.counts {
		low, high := h.bounds(i)
		if high > x {
			if x > low {
				seen += float64(n) * (x - low) / (high - low)
			}
			break
		}
		seen += float64(n)
	}
	return seen / float64(h.count)
}
