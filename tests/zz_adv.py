# ruff: noqa
import sys,time
from functools import partial
import torch
from lightning_parallel import *
from tests.ranks import POOL, run_on_ranks, on_one
from tests.zz_ep import L
from tests import models
from tests.curves import *
import tests.curves as C
def train2(column,*a,**k):
    from tests import zz_models, further
    further.MODELS.update({"zz_"+n:m for n,m in zz_models.MODELS.items()})
    return C.train(column,*a,**k)
class Differs(Exception): pass
def check2(c,n,s,dr,rtol=1e-9,**o):
    o.setdefault("data",{"samples":32,"val_samples":8})
    o={"max_epochs":1,"precision":"64-true",**o}
    m={"optimizer":partial(torch.optim.AdamW,lr=1e-2,eps=1e-3)}|o.pop("model",{})
    o["model"]=m
    exp=on_one(train2,c,**o)
    for r,g in enumerate(run_on_ranks(n,train2,c,s,data_ranks=dr,timeout=20,limit=80,**o)): compare(exp,g,rtol,where=f"rank {r}: ")
def tried(l,c,**o):
    t=time.time()
    try: check2("zz_"+c,*L[l],**o); print(l,c,"OK",round(time.time()-t,1),flush=True)
    except BaseException as e:
        if isinstance(e,KeyboardInterrupt): raise
        ls=str(e).splitlines(); k=[i for i,x in enumerate(ls) if "Error" in x or "still running" in x][:2]
        print(l,c,"FAIL",round(time.time()-t,1),"\n   ".join([ls[j].strip()[:300] for i in k for j in range(max(0,i-3),i+1)] or [x[:300] for x in ls[-4:]]),flush=True)
if __name__=="__main__":
    POOL.warm_up()
    from tests import zz_models
    names=sys.argv[2].split(",") if sys.argv[2]!="all" else list(zz_models.MODELS)
    for l in sys.argv[1].split(","):
        for c in names: tried(l,c)
