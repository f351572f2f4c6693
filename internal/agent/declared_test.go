// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"testing"

	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/datapath/datapathtest"
	"github.com/segue-lb/segue/internal/testhost"
)

func TestEachMapIsDeclared(t *testing.T) {
	t.Parallel()
	spec, _, err := loadSpec()
	testhost.Must(t, err)
	datapathtest.AreDeclared(t, spec, declared.Names(datapath.Private, datapath.Renewed, datapath.Kept, datapath.Expendable))
}
