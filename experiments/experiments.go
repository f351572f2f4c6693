// SPDX-License-Identifier: Apache-2.0

// Package experiments describes the experiments that segue-lab lab run knows by name.
package experiments

import "embed"

// Files has a file NAME.yaml for each experiment.
//
//go:embed *.yaml
var Files embed.FS
