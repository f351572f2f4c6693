// SPDX-License-Identifier: Apache-2.0

package wording

import (
	"fmt"
	"strings"
)

// Count returns a number with its English noun, which is given in the singular: 1 process,
// 2 processes. It knows regular plurals in -s and -es.
func Count(n int, noun string) string {
	switch {
	case n == 1:
	case strings.HasSuffix(noun, "s"):
		noun += "es"
	default:
		noun += "s"
	}
	return fmt.Sprintf("%d %s", n, noun)
}
