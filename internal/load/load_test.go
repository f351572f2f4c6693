// SPDX-License-Identifier: Apache-2.0

package load

import "time"

// limit is how long tests wait for what takes next to no time, unless the machine stands still.
const limit = time.Minute
