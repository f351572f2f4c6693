// SPDX-License-Identifier: Apache-2.0

package accept

import (
	"math"
	"math/big"
	"testing"

	"pgregory.net/rapid"
)

// TestCode has the vectors of the wire format. Values are in sixteenths.
func TestCode(t *testing.T) {
	for _, c := range []struct {
		load  Load
		code  uint8
		value uint32
	}{
		{Unknown, 0, 0},
		{Load{5, 0}, 0, 0},
		{Load{0, 1_000_000}, 1, 1},
		{Load{0, 16}, 1, 1},
		{Load{0, 2}, 8, 8},
		{Load{1, 2}, 16, 16},
		{Load{14, 15}, 16, 16},
		{Load{15, 15}, 18, 18}, // 17.07, rounded up
		{Load{3, 2}, 32, 32},
		{Load{4, 2}, 36, 40},
		{Load{62, 16}, 48, 64}, // 63, rounded up to the next power of two
		{Load{0, NoCapacity}, 16, 16},
		{Load{9, NoCapacity}, 68, 160},
		{Load{31_743, NoCapacity}, 255, 507_904},
		{Load{math.MaxUint32, 1}, 255, 507_904},
	} {
		if code := Code(c.load); code != c.code || Value(code) != c.value {
			t.Errorf("%+v: code %d of the value %d, want %d of %d",
				c.load, code, Value(code), c.code, c.value)
		}
	}
}

// TestEveryCodeIsUsed checks that codes are the codes of their own values, in ascending order.
func TestEveryCodeIsUsed(t *testing.T) {
	for code := 1; code <= math.MaxUint8; code++ {
		value := Value(uint8(code))
		if got := Code(Load{value - 1, 16}); int(got) != code {
			t.Errorf("code %d has the value %d, whose code is %d", code, value, got)
		}
		if value <= Value(uint8(code-1)) {
			t.Errorf("code %d has the value %d, not more than the code before", code, value)
		}
	}
}

// TestCodeRoundsUp checks that the code of a load has the smallest value that is not less than the
// load. So codes keep the order of loads.
func TestCodeRoundsUp(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := anyLoad().Draw(t, "load")
		code := Code(l)
		if l.Capacity == 0 || code == 255 {
			return
		}
		exact, value := sixteenths(l), int64(Value(code))
		if exact.Cmp(big.NewRat(value, 1)) > 0 {
			t.Fatalf("code %d has the value %d, the load is %v", code, value, exact)
		}
		if before := int64(Value(code - 1)); exact.Cmp(big.NewRat(before, 1)) <= 0 {
			t.Fatalf("code %d, but the one before has the value %d of %v", code, before, exact)
		}
		if free := l.free(); l.Capacity != NoCapacity && free != (code <= 16) {
			t.Fatalf("code %d, free %t", code, free)
		}
	})
}
