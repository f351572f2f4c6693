// SPDX-License-Identifier: Apache-2.0

package fieldpath

import (
	"fmt"
	"reflect"
)

// Bounds are the smallest and the greatest valid number of a field.
type Bounds struct{ Low, High uint64 }

// ParseBounds reads a field's range tag, such as `range:"0 to 1000"`. It panics if the tag is not
// valid, because tags are part of the program.
func ParseBounds(tag string) (b Bounds) {
	if _, err := fmt.Sscanf(tag, "%d to %d", &b.Low, &b.High); err != nil {
		panic(fmt.Sprintf("field: range tag %q: %v", tag, err))
	}
	return b
}

// Contain tells whether a value is within the bounds. The value must be of an integer type.
func (b Bounds) Contain(value reflect.Value) bool {
	if value.CanInt() {
		return value.Int() >= 0 && b.ContainNumber(uint64(value.Int()))
	}
	return b.ContainNumber(value.Uint())
}

// ContainNumber tells whether a number is within the bounds.
func (b Bounds) ContainNumber(number uint64) bool { return number >= b.Low && number <= b.High }

// String returns the bounds as "from LOW to HIGH".
func (b Bounds) String() string { return fmt.Sprintf("from %d to %d", b.Low, b.High) }
